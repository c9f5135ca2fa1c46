"""Parameter sweeps: run one scenario with many combinations of settings, and tabulate the results.

``simkv.study.sweep_axes`` defines the combinations, ``sweep`` builds and runs them, and
``sweep_table`` tabulates the results.
"""
