"""The simulated engine behind a socket: any client takes it for the real one.

The loop, the schedulers and the costs are those of a run; ``live`` puts them on the wall clock,
``app`` speaks HTTP; what came can be run again (``again``), and that is how it is explained
(``explainer``).
"""
