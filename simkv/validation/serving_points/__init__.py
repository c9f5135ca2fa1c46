"""Replay measured serving points of public benchmarks and score: ``simkv validate silicon``.

``measured_rows`` reads the points, ``launch_recipe`` describes how each was run,
``closed_loop_replay`` simulates it, ``point_prediction`` writes the predictions of a file,
``point_scores`` compares them by group, ``point_tables`` formats the results.
"""
