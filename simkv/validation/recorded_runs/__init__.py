"""Recorded runs of real engines, simulated again and compared figure by figure.

``case`` reads a recorded run, ``told`` one of which only statistics are public, ``calibration``
finds the costs that belong to it, ``simulate`` simulates it, ``score`` compares, ``sensitivity``
varies what was not recorded; ``paced`` goes through the steps at the pace of the record, ``steps``
measures what they took above their kernels; ``show``, ``files`` and ``docs`` tell it on the
console, as CSV files and as a page.
"""
