"""vLLM (v1): its rules, and its releases as data."""
