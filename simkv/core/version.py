"""The version of simkv."""

__version__ = "0.1.0"
