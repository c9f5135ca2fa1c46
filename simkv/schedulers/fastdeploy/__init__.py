"""FastDeploy: resource manager and worker, with block reservation schemes as variants."""
