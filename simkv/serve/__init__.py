"""The simulated engine behind a socket: any client takes it for the real one.

The loop, the schedulers and the costs are those of a run; ``live`` puts them on the wall clock,
``app`` speaks HTTP, and what came can be run again (``again``), which is also how it is explained.
"""
