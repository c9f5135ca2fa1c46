"""Analyze variations of a scenario: the smallest failing workload, the setting at which the verdict
flips, the best change.

Each analysis runs many variations and compares the results: ``workload_shrinking`` removes
requests, ``verdict_bisection`` varies one setting, and ``whatif`` tries one change at a time.
"""
