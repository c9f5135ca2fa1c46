"""Step costs: the duration of a step in seconds, with its valid range, error and source.

``cost_profile`` defines the typed JSON profile, ``simulated_executor`` the executor that uses it.
``attention_table`` and ``attention_grid`` evaluate attention times; ``held_out_errors`` and
``scaled_executor`` compute and apply errors of step times. Profiles come from ``sources``,
``operators`` and simkv's own measurements (``simkv.gpu``); ``hardware`` describes GPUs and models.
"""
