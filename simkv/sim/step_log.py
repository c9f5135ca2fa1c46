# mypyc: compile
"""Step log with one row per step. Repeated steps are stored compactly."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from simkv.costs.step_load import StepLoad


class QueueState(NamedTuple):
    """Queue lengths and free blocks after a schedule call."""

    waiting: int
    running: int
    free_blocks: int


COLUMNS = (
    *("decided", "start", "end", "kind", "prefill_seqs", "prefill_tokens", "decode_seqs"),
    *("preempted", "waiting", "running", "free_blocks"),
)
#: Names of the stored arrays besides ``_first``.
STORED_COLUMNS = (
    *("end", "free_blocks", "_lag", "_decided", "_start", "_kind", "_preempted"),
    *("_prefill_seqs", "_prefill_tokens", "_decode_seqs", "_waiting", "_running"),
)


class StepLog:
    """Step log with one row per step. Times are in seconds.

    ``decided`` is the time of the scheduling decision. ``waiting``, ``running`` and ``free_blocks``
    are the state after the decision.
    """

    # A step and the steps that repeat it form a run. Only ``end`` and ``free_blocks`` are stored
    # per row. The other columns are stored per run and expanded to rows when they are read.

    def __init__(self) -> None:
        self.end = array("d")
        self.free_blocks = array("q")
        # For each run: its first row and the values of that row. All other rows of the run start
        # when the previous row ends, preempt no request, and are decided at the end of the row
        # ``_lag`` rows earlier.
        self._first = array("q")
        self._lag = array("b")
        self._decided, self._start = array("d"), array("d")
        self._kind: list[str] = []
        self._preempted = array("i")
        self._prefill_seqs, self._prefill_tokens = array("i"), array("q")
        self._decode_seqs = array("i")
        self._waiting, self._running = array("i"), array("i")
        self._unfolded: dict[str, Any] = {}
        #: Number of rows that ``forget`` has dropped; the columns begin with the row after them.
        self.dropped = 0

    def __len__(self) -> int:
        return self.dropped + len(self.end)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepLog) and all(
            getattr(self, name) == getattr(other, name) for name in COLUMNS
        )

    __hash__ = None  # type: ignore[assignment]

    def append(
        self,
        times: tuple[float, float, float],
        kind: str,
        load: StepLoad,
        preempted: int,
        queues: QueueState,
    ) -> None:
        """Append the row of a step. ``times`` are (decided, start, end) in seconds."""
        self._first.append(len(self.end))
        self._lag.append(1)
        decided, start, end = times
        self._decided.append(decided)
        self._start.append(start)
        self.end.append(end)
        self._kind.append(kind)
        self._prefill_seqs.append(load.prefill_seqs)
        self._prefill_tokens.append(load.prefill_tokens)
        self._decode_seqs.append(load.decode_seqs)
        self._preempted.append(preempted)
        self._waiting.append(queues.waiting)
        self._running.append(queues.running)
        self.free_blocks.append(queues.free_blocks)

    def repeat(self, ends: array[float], free_blocks: list[int], lag: int) -> None:
        """Append repetitions of the newest row.

        ``ends`` (s) and ``free_blocks`` have one entry for each repetition.
        """
        # Each repetition was decided when the row ``lag`` rows earlier ended.
        self._lag[-1] = lag
        self.end.extend(ends)
        self.free_blocks.fromlist(free_blocks)

    def forget(self, rows: int) -> int:
        """Drop rows before row ``rows`` to free memory. Return the number of dropped rows."""
        # A row is dropped only if all rows of its run (a step and its repetitions) are dropped.
        run = bisect_right(self._first, rows - self.dropped) - 1
        if run <= 0:
            return 0
        cut = self._first[run]
        self._unfolded = {"decided": self.decided}  # the other columns do not need earlier rows
        for column in (self.end, self.free_blocks, self._unfolded["decided"]):
            del column[:cut]
        for name in STORED_COLUMNS[2:]:
            del getattr(self, name)[:run]
        self._first = array("q", [first - cut for first in self._first[run:]])
        self.dropped += cut
        return cut

    def extend(self, other: StepLog) -> None:
        """Append all rows of another log."""
        rows = len(self.end)
        self._first.extend([first + rows for first in other._first])
        for name in STORED_COLUMNS:
            getattr(self, name).extend(getattr(other, name))

    @property
    def decided(self) -> array[float]:
        return self._times("decided", self._decided, self._lag)

    @property
    def start(self) -> array[float]:
        return self._times("start", self._start, None)

    @property
    def kind(self) -> list[str]:
        found: list[str] = self._unfolded.setdefault("kind", [])
        if len(found) < len(self.end):
            run, lengths = self._missing(len(found))
            found.extend(chain.from_iterable(map(repeat, self._kind[run:], lengths)))
        return found

    @property
    def prefill_seqs(self) -> array[int]:
        return self._counts("prefill_seqs", self._prefill_seqs)

    @property
    def prefill_tokens(self) -> array[int]:
        return self._counts("prefill_tokens", self._prefill_tokens)

    @property
    def decode_seqs(self) -> array[int]:
        return self._counts("decode_seqs", self._decode_seqs)

    @property
    def preempted(self) -> array[int]:
        return self._counts("preempted", self._preempted, once=True)

    @property
    def waiting(self) -> array[int]:
        return self._counts("waiting", self._waiting)

    @property
    def running(self) -> array[int]:
        return self._counts("running", self._running)

    def _counts(self, name: str, by_run: array[int], *, once: bool = False) -> array[int]:
        """Return a column of counts."""
        # All rows of a run have the value of its first row. With ``once``, all rows after the first
        # have the value 0.
        found: array[int] = self._unfolded.setdefault(name, array(by_run.typecode))
        if (done := len(found)) < len(self.end):
            run, lengths = self._missing(done)
            rows = np.repeat(np.array(by_run[run:]), lengths)
            if once:
                here = self._at_first(run, done)
                kept = rows[here]
                rows[:] = 0
                rows[here] = kept
            found.frombytes(rows.tobytes())
        return found

    def _times(self, name: str, by_run: array[float], lag: array[int] | None) -> array[float]:
        """Return a column of times (s)."""
        # The first row of a run has its own value. The value of any other row is the end of the row
        # ``lag`` rows earlier (one row earlier if ``lag`` is None).
        found: array[float] = self._unfolded.setdefault(name, array("d"))
        if (done := len(found)) < len(self.end):
            run, lengths = self._missing(done)
            back = 1 if lag is None else np.repeat(np.array(lag[run:]), lengths)
            rows = np.frombuffer(self.end)[np.arange(done, len(self.end)) - back]
            here = self._at_first(run, done)
            rows[here] = by_run[len(by_run) - len(here) :]
            found.frombytes(rows.tobytes())
        return found

    def _missing(self, done: int) -> tuple[int, Any]:
        """Return the run that contains row ``done``, and the number of remaining rows of
        each run.
        """
        # Earlier runs are omitted. Rows before ``done`` are not counted.
        run = bisect_right(self._first, done) - 1
        borders = np.append(np.array(self._first[run:]), len(self.end))
        return run, np.diff(np.maximum(borders, done))

    def _at_first(self, run: int, done: int) -> Any:
        """Return the first row of each run, from run ``run`` on, relative to row ``done``."""
        firsts = np.array(self._first[run:])
        return firsts[firsts >= done] - done
