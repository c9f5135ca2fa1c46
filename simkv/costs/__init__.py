"""Step costs: the duration of an engine step in seconds, with its valid range, its error and the
source of the data.

``cost_profile`` defines cost profiles, which are JSON files. ``simulated_executor`` is the executor
that uses them. ``attention_table`` and ``attention_grid`` evaluate attention times.
``held_out_errors`` computes the errors of step times, and ``scaled_executor`` applies them.
Profiles come from published measurements (``sources``), from the times of single operators
(``operators``) and from simkv's own measurements (``simkv.gpu``). ``hardware`` describes GPUs and
models.
"""
