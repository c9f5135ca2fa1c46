"""A scheduler of one's own: how it is loaded, what it starts from, the laws that it must keep."""
