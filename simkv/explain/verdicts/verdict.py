"""The base class of verdicts, and phrases for their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from simkv.core.figure_registry import format_seconds
from simkv.core.outcome import Outcome
from simkv.sim.run_record import RequestRecord, RunRecord, Shortfall

#: A simulation of a single request in isolation is cut off after this multiple of its timeout.
MAX_TIMEOUT_MULTIPLE = 10.0


@dataclass(frozen=True)
class Verdict:
    """A problem found in a run.

    ``requests`` has the ids of the fewest requests that show the problem.
    """

    name: ClassVar[str]
    requests: tuple[int, ...]

    @property
    def text(self) -> str:
        """Description of the problem in one or two sentences."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as in ``summary.json``: name, text and evidence."""
        evidence = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {"verdict": self.name, "text": self.text, **evidence}


def _plain(value: Any) -> Any:
    """Convert evidence to JSON values. A named tuple becomes an object."""
    if isinstance(value, tuple):
        named = getattr(value, "_asdict", None)
        return _plain(named()) if named else [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def requests_with_outcome(record: RunRecord, outcome: Outcome) -> list[RequestRecord]:
    """Return the records of requests with the given outcome."""
    return [life for life in record.requests.values() if life.outcome is outcome]


def name_requests(ids: Sequence[int], most: int = 8) -> str:
    """Return at most ``most`` ids as a phrase, such as ``request 3`` or ``requests 3, 5 and 9
    more``.
    """
    first = ", ".join(map(str, ids[:most]))
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f"request{'s' if len(ids) > 1 else ''} {first}{more}"


def times_phrase(count: int) -> str:
    """Return a frequency as a phrase: ``once`` or ``3 times``."""
    return "once" if count == 1 else f"{count} times"


def count_phrase(ids: Sequence[int]) -> str:
    """Return the number of ids as a phrase: ``one request`` or ``3 requests``."""
    return "one request" if len(ids) == 1 else f"{len(ids)} requests"


def describe_shortfall(lacked: Shortfall, timeout: float) -> str:
    """Return a clause with the duration of a request in isolation and its delay by other requests.

    ``timeout`` is in seconds.
    """
    if lacked.isolated_s is None:
        return (
            "in isolation it would not have finished within "
            f"{format_seconds(MAX_TIMEOUT_MULTIPLE * timeout)} either"
        )
    text = (
        f"in isolation it takes {format_seconds(lacked.isolated_s)}, and its timeout is "
        f"{format_seconds(timeout)}"
    )
    if lacked.remaining_s is not None:
        text += f"; it needed {format_seconds(lacked.remaining_s)} more"
    return f"{text}; other requests delayed it by {format_seconds(lacked.delay_s)}"
