"""Verdicts: problems found in a run, each with evidence and the fewest requests that show it."""
