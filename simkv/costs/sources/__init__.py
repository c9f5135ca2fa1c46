"""Profiles from what others measured: a module for each source, and how their tables are read.

``sync`` fits one to the rows of requests that were alone on an engine.
"""
