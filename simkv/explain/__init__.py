"""Why it went so: the wait ledger, who blocked whom, verdicts."""
