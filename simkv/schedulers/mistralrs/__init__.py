"""mistral.rs: its paged-attention scheduler; pull requests as variants."""
