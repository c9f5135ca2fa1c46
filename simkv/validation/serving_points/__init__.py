"""Measured serving points of public benchmarks, replayed and judged: ``simkv validate silicon``.

``rows`` reads them, ``recipe`` says how each was run, ``replay`` runs it, ``predict`` makes the
predictions of a file, ``score`` compares them by group, ``page`` writes that down.
"""
