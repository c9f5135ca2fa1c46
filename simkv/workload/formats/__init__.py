"""Trace formats, one module per format."""
