"""Limits for goodput, in the syntax of ``vllm bench serve --goodput ttft:500 tpot:50``."""

from __future__ import annotations

from collections.abc import Iterable

from simkv.core.errors import InputError, spelling_hint

#: Latencies that can have a limit, by their names in ``vllm bench serve``.
GOODPUT_LATENCIES = ("ttft", "tpot", "e2el")


def parse_goodput_limits(words: Iterable[str]) -> dict[str, float]:
    """Parse limits such as ``ttft:500 tpot:50 e2el:2000``. Return the limits in ms, by name.

    Raises InputError for an unknown name, or for a limit that is not a number of at least 0.
    """
    limits: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition(":")
        if name not in GOODPUT_LATENCIES:
            raise InputError(
                f"--goodput {word}: unknown latency "
                f"{name!r}{spelling_hint(name, GOODPUT_LATENCIES)}; expected "
                f"NAME:MILLISECONDS with NAME one of {', '.join(GOODPUT_LATENCIES)}"
            )
        if name in limits:
            raise InputError(f"--goodput {word}: {name} is given twice")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = -1.0
        if not 0 <= limits[name] < float("inf"):
            raise InputError(
                f"--goodput {word}: expected non-negative milliseconds, as in {name}:500; "
                f"found {text or 'nothing'}"
            )
    return limits
