"""Native engine: the schedulers of engines themselves, run behind import stubs.

Each source of an engine (a checkout, a wheel, an installed package) runs in a process of its own.
"""
