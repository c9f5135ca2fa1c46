"""Verdict: clients gave up on requests that are too long for their timeout."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.core.figure_registry import format_seconds
from simkv.core.outcome import Outcome
from simkv.explain.verdicts.verdict import Verdict, count_phrase, requests_with_outcome
from simkv.sim.run_record import RunRecord


@dataclass(frozen=True)
class TimedOutRequests(Verdict):
    """Clients gave up, and would have in isolation as well, or their requests never waited.

    The worst request takes ``alone`` seconds in isolation (None: more than ten times its
    ``timeout``). When its client left, it ``lacked`` that number of seconds, and others had delayed
    it by ``company`` (s).
    """

    name = "timed_out"
    all: tuple[int, ...]
    timeout: float
    alone: float | None
    lacked: float | None
    company: float

    @property
    def text(self) -> str:
        worst, timeout = self.requests[0], format_seconds(self.timeout)
        text = f"{count_phrase(self.all)} timed out; request {worst} "
        if self.alone is None:
            return f"{text}would need more than ten times its timeout of {timeout} in isolation"
        text += f"takes {format_seconds(self.alone)} in isolation, its timeout is {timeout}"
        if self.lacked is not None:
            text += f"; it needed {format_seconds(self.lacked)} more"
        return f"{text}; other requests delayed it by {format_seconds(self.company)}"


def find_timed_out(record: RunRecord) -> TimedOutRequests | None:
    """Return the verdict, or None; the worst request has the largest known shortfall."""
    lives = requests_with_outcome(record, Outcome.TIMED_OUT)
    ids = tuple(life.request.id for life in lives)
    known = [i for i in ids if i in record.shortfalls]
    if not known:
        return None

    def lack(i: int) -> tuple[bool, float, int]:
        short = record.shortfalls[i]
        return short.lacked is None, short.lacked or 0.0, -i

    worst = max(known, key=lack)
    short = record.shortfalls[worst]
    timeout = record.requests[worst].request.timeout or 0.0
    return TimedOutRequests((worst,), ids, timeout, short.alone, short.lacked, short.company)
