"""Sweeps: one scenario at many settings of its knobs, in one table.

``design`` says which points, ``point`` what one of them is and how it is run, ``workers`` where
(all cores, or a Ray cluster), ``store`` what has been done, ``table`` and ``plots`` what came out;
``sweep`` puts them together.
"""
