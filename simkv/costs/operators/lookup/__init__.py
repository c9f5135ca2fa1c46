"""Lookups in measured tables, one module per operator family; None if a table is missing."""
