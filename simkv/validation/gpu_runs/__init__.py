"""Runs of simkv's own GPU runner, and their comparison with the profile.

``validation_suite`` and ``load_sizing`` choose the scenarios from the data-sheet costs of
``nominal_costs``; ``validation_plan_file`` stores them with their predictions. ``timed_replay``
reads a run and replays its decisions (L0). ``comparison_levels`` compares steps (L1) and free
simulations (L2), without ``stalled_steps`` and beside the simple cost models of
``baseline_models``. ``device_drift`` measures changes of the device. ``run_ranking`` compares all
runs of a plan; ``gpu_report`` and ``gpu_plots`` present the results.
"""
