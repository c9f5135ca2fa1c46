"""Serve the simulated engine over HTTP. Clients of the real engine's API can use it unchanged.

``live_simulation`` runs the simulation in real time, and ``http_app`` is the HTTP API.
``recorded_workload`` converts received requests to a workload for simulations without a server, and
``live_explainer`` explains their waiting times.
"""
