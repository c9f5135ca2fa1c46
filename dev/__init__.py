"""Tools for maintainers, which are not in the wheel: constant fits, generated pages and recording
counts.
"""
