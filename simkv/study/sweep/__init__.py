"""Parameter sweeps: one scenario at many settings of its knobs, in one table.

``random_sampling`` and ``simkv.study.sweep_axes`` define the points, ``sweep`` builds and runs
them, and ``sweep_table`` tabulates the results.
"""
