"""Custom schedulers and policies: loading, base classes, and the laws that they must obey."""
