"""Models and GPUs as data, and how much KV fits."""
