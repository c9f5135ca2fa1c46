"""Requests that clients send: workloads, generators, length distributions and trace formats."""
