"""Studies of many runs: job runner, sweeps, capacity plans, what-if analyses and policy search."""
