"""Explanation of a run: why each request waited (the wait ledger), which requests it waited for,
and which problems were found (verdicts).
"""
