"""What a step costs: seconds for a ``StepLoad``, with a range, an error and a source.

``profile`` is that as typed JSON, ``simulated`` the executor that asks it; ``attention`` evaluates
a table of attention times, ``error`` and ``erring`` say how wrong a cost is and let it be. Profiles
come from ``sources`` and from simkv's own measurements (lab/); ``hardware`` is what is known of
GPUs and models.
"""
