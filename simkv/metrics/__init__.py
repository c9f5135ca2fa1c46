"""Metrics of a run: latencies, throughput, goodput, and their intervals."""
