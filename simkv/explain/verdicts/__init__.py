"""Verdicts: problems found in a run, with evidence and few example requests."""
