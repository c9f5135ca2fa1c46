"""Parameter sweeps: one scenario at many settings of its knobs, in one table.

``simkv.study.sweep_axes`` defines the points, ``sweep`` builds and runs them, and ``sweep_table``
tabulates the results.
"""
