"""Data on models and GPUs, and the KV cache capacity that results from them."""
