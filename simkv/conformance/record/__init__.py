"""Record what an engine's own scheduler decides, and find the rules by which a release goes."""
