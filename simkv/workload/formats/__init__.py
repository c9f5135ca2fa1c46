"""Formats of traces, one file each; ``find`` knows a file by its content."""
