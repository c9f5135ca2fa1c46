"""Search for a better scheduler: knobs, rules of the policy language, or external code."""
