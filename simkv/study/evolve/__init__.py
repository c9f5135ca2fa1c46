"""Look for a better scheduler: knobs, rules of a small language, or code that somebody proposes."""
