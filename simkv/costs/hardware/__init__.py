"""Data on models and GPUs, and the KV capacity that follows from them."""
