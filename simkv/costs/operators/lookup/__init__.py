"""Lookups in the measured tables, an operator family a file; None where a table is missing."""
