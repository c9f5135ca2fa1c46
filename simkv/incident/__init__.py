"""Diagnose a production server from its output: affected requests, cause, and suggested flag."""
