"""Search for a better scheduler: settings, policies of the policy language, or external code."""
