"""Lookups in measured tables, one module per operator; they return None if a table is missing."""
