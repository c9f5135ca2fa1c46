"""Tools of maintainers: fitted constants, generated pages, counts; not in the wheel."""
