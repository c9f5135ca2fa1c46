"""Simulate the measured serving points of public benchmarks, and score the predictions (``simkv
validate silicon``).

``measured_rows`` reads the points, ``launch_recipe`` is the configuration of each point, and
``closed_loop_replay`` simulates it. ``point_prediction`` predicts all points of a file,
``point_scores`` scores the predictions by group, and ``point_tables`` formats the results.
"""
