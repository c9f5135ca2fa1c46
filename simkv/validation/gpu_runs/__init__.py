"""Runs of simkv's own GPU runner, and the profile that they judge.

``suite`` and ``sizing`` choose what is to be served by the data sheet of ``nominal``, ``plan``
keeps that and its predictions; ``replay`` reads a run and replays its decisions (L0), ``levels``
compares steps (L1) and free simulations (L2), beside the plain cost models of ``baselines`` and
without the ``stalls``; ``drift`` is that of the device; ``judge`` does it for all runs of a plan,
``page`` and ``plots`` show it.
"""
