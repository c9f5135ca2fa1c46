"""mistral.rs: its paged-attention scheduler, with pull requests as variants."""
