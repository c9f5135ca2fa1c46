"""Requests that clients send: workload forms, generators, length distributions, trace formats."""
