"""Scenario files: typed models, validation with line numbers, and saving."""
