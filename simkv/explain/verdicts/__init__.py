"""Verdicts: problems found in a run, each with evidence and with as few example requests as
possible.
"""
