"""Compare simulations with measured runs.

figure_comparison.py  a metric of a run and its simulated values
recorded_runs/        runs of real engines that others recorded, with times by request
serving_points/       measured serving points of public benchmarks
gpu_runs/             runs of simkv's own GPU runner, compared at three levels

This package does not need torch; ``simkv.gpu`` serves the runs.
"""
