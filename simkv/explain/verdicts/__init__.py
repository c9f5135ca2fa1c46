"""Verdicts on a run, each with its proof: the evidence and the fewest requests that show it."""
