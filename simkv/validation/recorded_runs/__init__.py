"""Recorded runs of real engines, simulated again and compared figure by figure.

``recorded_run`` reads a recorded run, ``published_statistics`` one with public statistics only.
``run_calibration`` finds its costs, ``run_simulation`` simulates it, ``run_scores`` compares.
``sensitivity`` varies unrecorded settings. ``paced_replay`` replays the steps at the recorded pace,
``host_gaps`` measures step time above kernel time. ``score_tables`` and ``score_files`` write the
results to the console and to CSV files.
"""
