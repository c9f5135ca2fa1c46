"""Shared definitions: requests, blocks, prefixes, the scheduler protocol and errors."""
