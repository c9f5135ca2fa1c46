"""The version of simkv."""

__version__ = "0.2.0"
