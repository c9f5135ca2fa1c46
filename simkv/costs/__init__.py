"""Step costs: the duration of a ``StepLoad`` in seconds, with a range, an error and a source.

``cost_profile`` defines the typed JSON profile, ``simulated_executor`` the executor that uses it.
``attention_table`` and ``attention_grid`` evaluate attention times; ``step_errors`` and
``scaled_executor`` compute and apply errors of step times. Profiles come from ``sources``,
``operators`` and simkv's own measurements (``simkv.gpu``); ``hardware`` describes GPUs and models.
"""
