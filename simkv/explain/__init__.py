"""Explanation of a run: why and for which requests each request waited, and the problems found
(verdicts).
"""
