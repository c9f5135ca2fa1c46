"""The error for invalid input, spelling suggestions, and simpler wording for pydantic messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

#: Number of names that a message about an unknown name suggests.
NEAREST_NAMES = 3


class InputError(Exception):
    """Invalid input. The message names the location, the error and the expected value."""


def spelling_hint(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` with the name that is most similar to ``name``.

    Returns an empty string if no known name is similar.
    """
    # A known name is similar if at least three quarters of the letters match in order, if it has
    # the same letters in another order, or if it starts with ``name`` (at least three letters).
    names = [one for one in known if one != name]
    match = get_close_matches(name, names, n=1, cutoff=0.75)
    match += [one for one in names if sorted(one) == sorted(name)]
    if len(name) >= 3:
        match += [one for one in names if one.startswith(name)]
    return f" (did you mean {match[0]!r}?)" if match else ""


def nearest_names(name: str, known: Iterable[str]) -> str:
    """Return a text such as ``nearest: a, b, c`` with the names most similar to ``name``."""
    # Organizations of models and manufacturers of GPUs are ignored.
    short = {re.sub(r".*/|^(nvidia|amd) ", "", one.casefold()): one for one in known}
    wanted = re.sub(r".*/|^(nvidia|amd) ", "", name.casefold())
    found = [one for one in short if one.startswith(wanted)]
    close = sorted(short, key=lambda one: -_similarity(wanted, one))
    found += [one for one in close if one not in found]
    return f"nearest: {', '.join(short[one] for one in found[:NEAREST_NAMES])}"


def _similarity(name: str, known: str) -> float:
    """Return how similar two names are, from 0 to 1; the end of the longer name may be missing."""
    return max(SequenceMatcher(None, name, one).ratio() for one in (known, known[: len(name)]))


#: Pydantic messages (patterns) and their replacements in plain words; the first match applies.
_PLAIN = [
    (r"input should be a valid integer.*", "should be a whole number"),
    (r"input should be a valid number.*", "should be a number"),
    (r"input should be a finite number.*", "should be a finite number"),
    (r"input should be a valid (dict|mapping).*", "should be a mapping of fields"),
    (r"input should be (a dictionary|an object|an instance).*", "should be a mapping of fields"),
    (r"input should be a valid (list|tuple|set|array).*", "should be a list"),
    (r"input should be a valid string.*", "should be text"),
    (r"input should be a valid boolean.*", "should be true or false"),
    # A positive number has a tiny minimum in place of 0.
    (
        r"input should be greater than or equal to (?:0\.0{5,}\d+|\de-\d+)",
        "should be greater than 0",
    ),
    (r"keys should be strings", "keys should be text"),
    (
        r"string should match pattern.*A-Za-z0-9.*",
        "should have only letters, digits, '.', '_', '-'",
    ),
    (
        r"(?:list|dictionary|tuple|string) should have (.*?)( after validation)?, not (\d+)",
        r"should have \1; found \3",
    ),
    (r"value error, (.*)", r"\1"),
    (r"input (should .*)", r"\1"),
]


def simplify_pydantic_message(message: str) -> str:
    """Reword a pydantic validation message in plain English."""
    for pattern, words in _PLAIN:
        found = re.fullmatch(pattern, message, re.IGNORECASE | re.DOTALL)
        if found:
            return found.expand(words)
    return message[:1].lower() + message[1:]
