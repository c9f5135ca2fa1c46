"""Compare simulations with measured runs.

figure_comparison.py  a figure of a run beside its simulated values, and tables of them
recorded_runs/        runs recorded by others, with times by request of an engine
serving_points/       measured serving points of public benchmarks
gpu_runs/             runs of simkv's own GPU runner, compared at three levels

This package does not need torch; ``simkv.gpu`` serves the runs.
"""
