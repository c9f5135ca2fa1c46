"""The version of simkv, and whether its loop is the compiled one."""

__version__ = "0.2.0"


def is_compiled() -> bool:
    """Whether the hot modules, of which this one goes along, are compiled (see make wheel)."""
    return not __file__.endswith(".py")
