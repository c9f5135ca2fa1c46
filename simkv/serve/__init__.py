"""Serve the simulated engine over HTTP, for any client of the real engine's API.

The engine loop, schedulers and costs are the same as in a run. ``live_simulation`` maps them to the
wall clock, ``http_app`` is the HTTP API, ``recorded_workload`` stores received requests so that
they can be simulated again, and ``live_explainer`` explains them.
"""
