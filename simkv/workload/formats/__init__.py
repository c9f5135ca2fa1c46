"""Trace formats, one module each; ``format_detection`` identifies a file by its content."""
