"""Lookups in measured tables, one module per operator. They return None if a table is missing."""
