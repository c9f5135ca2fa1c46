"""Input that cannot be used, in one message that says what would be right."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(Exception):
    """Bad input. The message names file, line and field, what is wrong and what would be right."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known name most like ``name``, or nothing."""
    match = get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
