# mypyc: compile
"""The version of simkv, and whether the compiled modules are in use."""

__version__ = "0.2.0"


def is_compiled() -> bool:
    """Return whether the performance-critical modules are compiled (``make wheel``)."""
    return not __file__.endswith(".py")
