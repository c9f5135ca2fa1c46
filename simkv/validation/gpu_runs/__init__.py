"""Runs of simkv's own GPU runner, and their comparison with the predictions of a cost profile.

``validation_suite`` and ``load_sizing`` choose the scenarios from the data-sheet costs of
``nominal_costs``. ``validation_plan_file`` stores the scenarios with their predictions.
``timed_replay`` reads a run and replays its decisions. ``comparison_levels`` compares step times
and free simulations, without the steps found by ``stalled_steps``. ``baseline_models`` are simple
cost models for comparison. ``device_drift`` measures changes of the device. ``run_ranking``
compares all runs of a validation plan. ``gpu_report`` and ``gpu_plots`` present the results.
"""
