"""Search of an engine's history for the commit or release that changes the result of a scenario."""
