"""Simulation of scenarios: engine loop, clock, run records, async pipeline and fleets."""
