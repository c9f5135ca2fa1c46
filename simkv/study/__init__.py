"""Studies of many runs: job runner, sweeps, capacity plans, what-ifs and policy search."""
