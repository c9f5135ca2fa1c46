"""Analyze variations of a scenario to find the smallest workload that still shows a problem, the
value of a setting at which the verdict changes, or the change that helps most.

Each analysis runs many variations and compares the results: ``workload_shrinking`` removes
requests, ``verdict_bisection`` varies one setting, and ``whatif`` tries one change at a time.
"""
