"""What-if analysis: the smallest failing workload, verdict flips, and the best single change.

All of it runs many variations of a scenario and compares the results: ``workload_shrinking``
removes requests, ``verdict_bisection`` varies one knob, ``whatif`` tries one change at a time.
"""
