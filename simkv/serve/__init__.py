"""Serve the simulated engine over HTTP. Clients of the real engine's API can use it unchanged.

The engine loop, schedulers and costs are the same as in a simulation without a server.
``live_simulation`` runs the simulation in real time, and ``http_app`` is the HTTP API.
``recorded_workload`` converts received requests to a workload that can be simulated again, and
``live_explainer`` explains their waiting times.
"""
