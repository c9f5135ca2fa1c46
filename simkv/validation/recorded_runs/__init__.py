"""Recorded runs of real engines, which are simulated again and compared metric by metric.

``recorded_run`` reads a recorded run, and ``published_statistics`` reads a run with public
statistics only. ``run_calibration`` selects the step costs, ``run_simulation`` simulates the run,
and ``run_scores`` compares the results. ``sensitivity`` varies unrecorded settings.
``paced_replay`` replays the steps at the recorded pace, and ``host_gaps`` measures the host time of
steps. ``score_tables`` and ``score_files`` write the results to the console and to CSV files.
"""
