"""The scenario file: typed models, line numbers, saving."""
