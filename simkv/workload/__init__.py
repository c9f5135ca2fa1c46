"""Requests that clients send: forms of a workload, generators, length distributions and trace
formats.
"""
