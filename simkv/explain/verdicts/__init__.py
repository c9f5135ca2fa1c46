"""Verdicts on a run, each with its evidence and the smallest set of requests that shows it."""
