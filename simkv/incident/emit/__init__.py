"""A run written down as the real server would have: what the readers read, and nothing more."""
