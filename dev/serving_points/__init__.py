"""Fit the constants of composed costs to published serving points and generate docs/silicon.md."""
