"""Studies of many runs: a common job runner, sweeps, capacity plans, what-ifs and policy search."""
