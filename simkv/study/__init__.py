"""Many runs: one runner, and on top of it sweeps, plans and what-ifs."""
