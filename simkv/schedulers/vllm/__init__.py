"""Port of vLLM's V1 scheduler, with its releases as data."""
