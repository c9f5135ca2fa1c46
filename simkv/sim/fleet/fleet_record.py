"""The record of a fleet, merged from the records of its replicas.

The step logs are concatenated. The rows of one replica are therefore consecutive and in time order,
but the whole log is not in time order. Metrics that are computed from the rows of a single request
(tokens, latencies, gaps) are valid. Metrics that need all steps in time order must use the records
of the replicas.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import accumulate, chain
from operator import itemgetter

from simkv.core.request import Request
from simkv.sim.run_record import (
    DraftCounts,
    Interruptions,
    KvCopyCounts,
    RequestRecord,
    RunRecord,
)
from simkv.sim.segments import shift_rows


def merge_records(
    parts: Sequence[RunRecord],
    lives: Mapping[int, Sequence[tuple[int, RequestRecord]]],
    end: float,
    requests: Mapping[int, Request] | None = None,
    unobserved: Mapping[int, Sequence[tuple[int, RequestRecord]]] | None = None,
) -> RunRecord:
    """Return the record of a fleet whose run ended at ``end`` (s).

    - ``parts``: run records of the replica lifetimes.
    - ``lives``: for each request, the records that its client observed, in order. Each is paired
      with the index of its run record in ``parts``.
    - ``unobserved``: records that the client did not observe, in the same form.
    - ``requests``: requests as sent by clients, if the replicas received modified requests.
    """
    # The preemptions in ``unobserved`` are counted as well. The engine halt of the result is the
    # earliest halt of all parts.
    record = RunRecord(sum(part.num_blocks for part in parts))
    for part in parts:
        record.steps.extend(part.steps)
    if any(part.delivered is not None for part in parts):
        record.delivered = array("d", chain.from_iterable(part.token_times for part in parts))
    record.idle_passes = sum(part.idle_passes for part in parts)
    record.end = end
    for part in parts:
        record.isolated_s.update(part.isolated_s)
    counted = [part.drafting for part in parts if part.drafting]
    if counted:
        record.drafting = DraftCounts(
            *(sum(counts) for counts in zip(*map(astuple, counted), strict=True))
        )
    copied = [part.copied for part in parts if part.copied]
    if copied:
        record.copied = KvCopyCounts(
            sum(counts.loaded_tokens for counts in copied),
            sum(counts.stored_tokens for counts in copied),
            _known(counts.read_tokens for counts in copied),
            _known(counts.written_tokens for counts in copied),
        )
    stops = [part.engine_halt for part in parts if part.engine_halt]
    record.engine_halt = min(stops, key=lambda stop: stop.since, default=None)
    offsets = [0, *accumulate(len(part.steps) for part in parts)]
    for i, way in lives.items():
        life = _one([_shifted(life, offsets[part]) for part, life in way])
        if unobserved and i in unobserved:
            life = _counted(life, [_shifted(other, offsets[part]) for part, other in unobserved[i]])
        record.requests[i] = replace(life, request=requests[i]) if requests else life
    return record


def _known(counts: Iterable[int | None]) -> int | None:
    """Return the sum of the counts that are not None, or None if all are None."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _shifted(life: RequestRecord, rows: int) -> RequestRecord:
    """Return the record with all row numbers increased by ``rows``."""
    if not rows:
        return life
    mishaps = life.interruptions
    if mishaps is not None:
        mishaps = replace(
            mishaps,
            dropped_rows=[row + rows for row in life.dropped_rows],
            preempted_rows=[row + rows for row in life.preempted_rows],
        )
    more = None
    if life.accepted_drafts is not None:
        more = array("i", [n + rows * (k % 2 == 0) for k, n in enumerate(life.accepted_drafts)])
    return replace(
        life,
        accepted_drafts=more,
        segment_data=shift_rows(life.segment_data, rows, (1, 2)),
        chunk_rows=shift_rows(life.chunk_rows, rows, (0,)),
        interruptions=mishaps,
    )


def _one(lives: Sequence[RequestRecord]) -> RequestRecord:
    """Merge the consecutive records of a request on several replicas into one."""
    if len(lives) == 1:
        return lives[0]
    first_tokens = [life.first_token for life in lives if life.first_token is not None]
    last_tokens = [life.last_token for life in lives if life.last_token is not None]
    whole = _counted(lives[-1], lives[:-1])
    return replace(
        whole,
        request=lives[0].request,
        first_token=first_tokens[0] if first_tokens else None,
        last_token=last_tokens[-1] if last_tokens else None,
        tokens=sum(life.tokens for life in lives),
        accepted_tokens=sum(life.accepted_tokens for life in lives),
        drafted=any(life.drafted for life in lives),
        accepted_drafts=array(
            "i", chain.from_iterable(life.accepted_drafts or () for life in lives)
        )
        or None,
        segment_data=array("i", chain.from_iterable(life.segment_data for life in lives)),
        received_at=lives[0].received_at,
        entered_at=lives[0].entered_at,
        chunk_rows=array("i", chain.from_iterable(life.chunk_rows for life in lives)),
        interruptions=replace(
            whole.interruptions or Interruptions(),
            dropped_rows=[row for life in lives for row in life.dropped_rows],
            aside=[change for life in lives for change in life.aside],
        ),
    )


def _counted(life: RequestRecord, others: Sequence[RequestRecord]) -> RequestRecord:
    """Add the preemptions and recomputed tokens in ``others`` to a record, in row order."""
    lives = [*others, life]
    columns = ((x.preempted_rows, x.preempted_at, x.causes) for x in lives)
    taken = [one for rows, at, causes in columns for one in zip(rows, at, causes, strict=True)]
    taken.sort(key=itemgetter(0))
    return replace(
        life,
        bounces=sum(x.bounces for x in lives),
        recomputed_tokens=sum(x.recomputed_tokens for x in lives),
        interruptions=replace(
            life.interruptions or Interruptions(),
            preempted_rows=[row for row, _, _ in taken],
            preempted_at=[at for _, at, _ in taken],
            causes=[cause for _, _, cause in taken],
        ),
    )
