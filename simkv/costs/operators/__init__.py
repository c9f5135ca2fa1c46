"""Step costs composed of the times of single operators.

``operator_tables`` reads measured operator tables, and ``roofline`` estimates times from a data
sheet. Both provide ``OperatorTimes`` (``operator_times.py``). ``composition`` combines them into a
profile for a model, its number formats and its parallelism. ``profile_resolution`` selects the best
available profile. ``calibration_rules`` applies correction factors from calibrations.
"""
