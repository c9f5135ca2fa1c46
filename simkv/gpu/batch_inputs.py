"""A batch as the device sees it: flat integer arrays of a fixed size, and stored block tables.

A *seat* is a request's index in the device's token store and block tables. Each token has a token
slot, and each request of the step has a row slot. Decodes come first in both kinds of slots, then
prefills. Unused slots are padding. Padding belongs to the scratch seat, whose block table contains
only the null block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.core.scheduler_protocol import BatchRow, blocks_for

Ints = npt.NDArray[np.int32]


class StepSize(NamedTuple):
    """Padded size of a step: numbers of slots for ``tokens``, decoding requests and prefilling
    requests.
    """

    tokens: int
    decodes: int
    prefills: int


class StepInputs(NamedTuple):
    """Arrays of a step, all int32: numpy arrays on the host, tensors on the device.

    A seat is the index of a request in the device's tables. ``seat`` and ``position`` have one
    entry per token slot. ``row_seat``, ``length``, ``out_seat`` and ``out_position`` have one entry
    per row slot, which stands for a request. ``length`` is the number of tokens with KV after the
    step, or 0 for padding. The next token is written to ``out_seat`` and ``out_position``.
    ``start`` contains the first token slot of each prefill, and the end of the last prefill.
    """

    seat: Any
    position: Any
    row_seat: Any
    length: Any
    out_seat: Any
    out_position: Any
    start: Any


def input_views(buffer: Any, size: StepSize) -> StepInputs:
    """Return the inputs of a step of the given size as views into a flat buffer (numpy or
    torch).
    """
    return StepInputs(*(buffer[a:b] for a, b in pairwise(_offsets(size))))


def packed_length(size: StepSize) -> int:
    """Return the number of integers that a step of the given size occupies in the buffer."""
    return _offsets(size)[-1]


def _offsets(size: StepSize) -> list[int]:
    rows = size.decodes + size.prefills
    counts = (size.tokens, size.tokens, rows, rows, rows, rows, size.prefills + 1)
    return list(accumulate(counts, initial=0))


def split_rows(rows: Sequence[BatchRow]) -> tuple[list[BatchRow], list[BatchRow]]:
    """Split the requests of a batch into requests with one token and requests with several
    tokens.
    """
    decodes = [row for row in rows if row.tokens == 1]
    prefills = [row for row in rows if row.tokens > 1]
    return decodes, prefills


def fill(
    fields: StepInputs,
    decodes: Sequence[BatchRow],
    prefills: Sequence[BatchRow],
    emits: Collection[int],
    seats: Mapping[int, int],
    scratch: int,
) -> None:
    """Write a step into ``fields``. ``emits`` are the ids of requests that get a token."""
    first = len(fields.row_seat) - (len(fields.start) - 1)
    fields.seat.fill(scratch)
    fields.position.fill(0)
    fields.row_seat.fill(scratch)
    fields.length.fill(0)
    fields.out_seat.fill(scratch)
    fields.out_position.fill(0)
    count = len(decodes)
    if decodes:
        seat, _, context, out = _columns(decodes, emits, seats, scratch)
        fields.seat[:count] = seat
        fields.position[:count] = context
        _fill_rows(fields, slice(0, count), seat, context + 1, out)
    fields.start.fill(count)
    if prefills:
        seat, tokens, context, out = _columns(prefills, emits, seats, scratch)
        ends = count + np.cumsum(tokens, dtype=np.int32)
        end = int(ends[-1])
        fields.seat[count:end] = np.repeat(seat, tokens)
        begins = ends - tokens
        fields.position[count:end] = np.arange(count, end, dtype=np.int32)
        fields.position[count:end] += np.repeat(context - begins, tokens)
        _fill_rows(fields, slice(first, first + len(prefills)), seat, context + tokens, out)
        fields.start[1:] = end
        fields.start[1 : len(prefills) + 1] = ends


def _fill_rows(fields: StepInputs, rows: slice, seat: Ints, length: Ints, out: Ints) -> None:
    fields.row_seat[rows] = seat
    fields.length[rows] = length
    fields.out_seat[rows] = out
    fields.out_position[rows] = length


def _columns(
    rows: Sequence[BatchRow], emits: Collection[int], seats: Mapping[int, int], scratch: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the seat, tokens, context and output seat of each request."""
    seat = np.array([seats[row.id] for row in rows], dtype=np.int32)
    tokens = np.array([row.tokens for row in rows], dtype=np.int32)
    context = np.array([row.context for row in rows], dtype=np.int32)
    silent = np.array([row.id not in emits for row in rows])
    return seat, tokens, context, np.where(silent, np.int32(scratch), seat)


class TableDelta(NamedTuple):
    """Changes of the device's block tables: write ``blocks`` to the flat indices ``places``.

    ``unbacked`` is the number of the step's tokens that have no allocated block. As in the engines,
    their KV is written to the null block and is invalid.
    """

    places: list[int]
    blocks: list[int]
    unbacked: int


class TableTracker:
    """Track the contents of the device's block tables, so that only changes are sent.

    The scheduler only appends to a table object. If a request has a new table object, for example
    after a preemption, the whole table is sent.
    """

    def __init__(self, block_size: int, width: int) -> None:
        self.block_size = block_size
        self.width = width
        self._sent: dict[int, tuple[Sequence[int], int]] = {}

    def delta(
        self,
        rows: Sequence[BatchRow],
        tables: Mapping[int, Sequence[int]],
        seats: Mapping[int, int],
    ) -> TableDelta:
        """Return the changes that the device needs before it can run ``rows``."""
        places: list[int] = []
        blocks: list[int] = []
        unbacked = 0
        for row in rows:
            table = tables.get(row.id, ())
            known, sent = self._sent.get(row.id, (None, 0))
            if known is not table:
                sent = 0
            end = row.context + row.tokens
            needed = blocks_for(end, self.block_size)
            if needed <= sent:
                continue
            new = list(table[sent:needed])
            self._sent[row.id] = (table, sent + len(new))
            if len(new) < needed - sent:
                covered = (sent + len(new)) * self.block_size
                unbacked += end - max(covered, row.context)
                new += [0] * (needed - sent - len(new))
            start = seats[row.id] * self.width + sent
            places += range(start, start + len(new))
            blocks += new
        return TableDelta(places, blocks, unbacked)

    def forget(self, request_id: int) -> None:
        """Forget a request that has ended."""
        self._sent.pop(request_id, None)
