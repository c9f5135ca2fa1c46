"""What all rooms share: requests, blocks, prefixes, the scheduler protocol, errors."""
