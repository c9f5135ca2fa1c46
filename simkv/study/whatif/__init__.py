"""Analyze variations of a scenario.

``workload_shrinking`` finds the smallest workload that still shows a problem. ``verdict_bisection``
finds the value of a setting at which the verdict changes. ``whatif`` finds the single change that
helps most.
"""
