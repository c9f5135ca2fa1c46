"""Step costs composed of the times of single operators.

``tables`` reads measured operator tables and ``roofline`` estimates from a data sheet; both answer
to ``OperatorTimes`` (``operator_times.py``). ``compose`` puts them together to an ordinary profile
for a model, its formats and its parallelism; ``choice`` finds the best that there is. ``constants``
are what a calibration may change, neutral until then.
"""
