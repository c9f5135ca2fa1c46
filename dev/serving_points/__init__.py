"""Constants of composed costs, fitted to published serving points, and docs/silicon.md."""
