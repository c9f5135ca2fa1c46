"""Native engine: run an engine's own scheduler code (its source) in a separate process."""
