"""Limits of goodput, as ``vllm bench serve --goodput ttft:500 tpot:50`` takes them."""

from __future__ import annotations

from collections.abc import Iterable

from simkv.core.errors import InputError, spelling_hint

#: The latencies that may have a limit, by that tool's names for them.
GOODPUT_LATENCIES = ("ttft", "tpot", "e2el")


def parse_goodput_limits(words: Iterable[str]) -> dict[str, float]:
    """``ttft:500 tpot:50 e2el:2000`` as limits in ms by name.

    Raises InputError for another name, or a limit that is not a number from 0 on.
    """
    limits: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition(":")
        if name not in GOODPUT_LATENCIES:
            raise InputError(
                f"--goodput {word}: {name!r} is not "
                f"known{spelling_hint(name, GOODPUT_LATENCIES)}; expected "
                f"NAME:MILLISECONDS, NAME one of {', '.join(GOODPUT_LATENCIES)}"
            )
        if name in limits:
            raise InputError(f"--goodput {word}: {name} is given twice")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = -1.0
        if not 0 <= limits[name] < float("inf"):
            raise InputError(
                f"--goodput {word}: expected milliseconds from 0 on, as in {name}:500; "
                f"found {text or 'nothing'}"
            )
    return limits
