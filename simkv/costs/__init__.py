"""Cost models from measurements: operator tables, and profiles made of them or of request rows.

``attention`` evaluates a table of attention times; one module for each source builds a profile from
what it publishes; ``sync`` fits one to the rows of requests that were alone on the engine.
"""
