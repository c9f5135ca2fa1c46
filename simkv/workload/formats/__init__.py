"""Trace formats, one module per format; ``format_detection`` identifies the format of a file by its
content.
"""
