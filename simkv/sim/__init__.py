"""Simulation of scenarios: the engine loop, the clock, run records, the async pipeline and
fleets.
"""
