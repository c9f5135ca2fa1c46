"""Explanation of a run: the wait ledger, attribution of waiting to blockers, and verdicts."""
