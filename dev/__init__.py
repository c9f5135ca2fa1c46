"""Maintainer tools, not in the wheel: constant fits, generated pages and recording counts."""
