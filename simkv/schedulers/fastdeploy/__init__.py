"""FastDeploy: resource manager, worker, and its reservations as variants."""
