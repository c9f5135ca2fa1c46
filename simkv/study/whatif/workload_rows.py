"""List the requests of a workload as rows, and change rows without breaking shared prefixes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simkv.core.outcome import Outcome
from simkv.core.request import Request, Segment
from simkv.core.scheduler_protocol import blocks_for
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.sim.run_record import RequestRecord
from simkv.workload.listed_requests import ListedRequest, acceptance_fields
from simkv.workload.workload_section import Workload, build_clients

#: Values of the prefix fields for a prompt that shares no tokens with other prompts.
NOTHING_SHARED: dict[str, Any] = {
    "prefix_group": None,
    "prefix_tokens": 0,
    "hash_ids": None,
    "segments": None,
}


def list_requests(scenario: Scenario, folder: Path) -> dict[int, ListedRequest]:
    """Return the requests of a scenario by id, as rows of a listed workload with fixed arrivals.

    If arrivals depend on how requests are served, the scenario is run to determine them.
    """
    workload, timeout = scenario.workload, scenario.timeout
    sent = build_clients(workload, timeout)
    if workload.requests is not None and sent.open:
        return dict(enumerate(workload.requests))
    requests = sent.requests
    if not sent.open:
        lives = run_scenario(scenario, folder, intervals=False).record.requests
        requests = [lives[i].request for i in sorted(lives) if _was_sent(lives[i])]
    return {request.id: _row(request, timeout) for request in requests}


def _was_sent(life: RequestRecord) -> bool:
    """Return whether the request reached the engine before the run ended."""
    return life.outcome is not Outcome.CUT_OFF or life.received_at is not None


def _row(r: Request, timeout: float | None) -> ListedRequest:
    return ListedRequest(
        arrival=r.arrival,
        prompt_tokens=r.prompt_tokens,
        output_tokens=r.output_tokens,
        max_tokens=None if r.max_tokens == r.output_tokens else r.max_tokens,
        priority=r.priority,
        has_images=r.has_images,
        lora=r.lora,
        **acceptance_fields(r),
        routing_key=r.routing_key,
        client=r.client,
        logprobs_from=r.logprobs_from,
        retention=r.retention,
        ignore_eos=r.ignore_eos,
        timeout=None if r.timeout == timeout else r.timeout,
        **_shared(r),
    )


def _shared(r: Request) -> dict[str, Any]:
    """Return the fields of a row that describe the shared prefix of its prompt, in their shortest
    form.
    """
    match r.segments:
        case ():
            return {}
        case (Segment(group, 0, tokens), Segment(own, 0, _)) if (
            own == f"u{r.id}" and group[0] == "g"
        ):
            return {"prefix_group": group[1:], "prefix_tokens": tokens}
    return {"segments": [tuple(piece) for piece in r.segments if piece.end > piece.start]}


def change_row(row: ListedRequest, **fields: Any) -> ListedRequest:
    """Return the row with changed fields. A shorter prompt loses its last tokens."""
    data = {name: getattr(row, name) for name in ListedRequest.model_fields} | fields
    prompt = data["prompt_tokens"]
    if data["hash_ids"] is not None:
        data["hash_ids"] = data["hash_ids"][: blocks_for(prompt, data["hash_block_size"])]
    if data["segments"] is not None:
        data["segments"] = _beginning(data["segments"], prompt)
    data["prefix_tokens"] = min(data["prefix_tokens"], prompt)
    return ListedRequest.model_validate(data)


def _beginning(segments: Sequence[tuple[str, int, int]], tokens: int) -> list[tuple[str, int, int]]:
    pieces = []
    for stream, start, end in segments:
        if tokens > 0:
            pieces.append((stream, start, min(end, start + tokens)))
        tokens -= end - start
    return pieces


def renumber_rows(rows: Sequence[ListedRequest], numbers: Sequence[int]) -> list[ListedRequest]:
    """Number rows from 0, and adapt the prompts that refer to other rows.

    ``numbers`` contains the old numbers of the rows.
    """
    new = {str(number): str(index) for index, number in enumerate(numbers)}

    def stream(name: str) -> str:
        own = re.fullmatch(r"([uo])(\d+)", name)
        if not own:
            return name
        kind, number = own.groups()
        return kind + new[number] if number in new else f"gone-{name}"

    return [
        row
        if row.segments is None
        else change_row(row, segments=[(stream(s), start, end) for s, start, end in row.segments])
        for row in rows
    ]


@dataclass(frozen=True)
class WorkloadDraft:
    """A possible result of shrinking: requests with their original numbers, and a scenario.

    The scenario provides all fields except the workload.
    """

    scenario: Scenario
    numbers: tuple[int, ...]
    rows: tuple[ListedRequest, ...]

    @property
    def listed_scenario(self) -> Scenario:
        """The scenario with the requests as its workload."""
        workload = Workload(requests=renumber_rows(self.rows, self.numbers))
        return self.scenario.model_copy(update={"workload": workload})

    def without(self, start: int, end: int) -> WorkloadDraft:
        """Return the draft without the rows from index ``start`` to ``end`` (exclusive)."""
        return replace(
            self,
            numbers=self.numbers[:start] + self.numbers[end:],
            rows=self.rows[:start] + self.rows[end:],
        )

    def with_rows(
        self, change: Callable[[ListedRequest], ListedRequest], only: Collection[int] | None = None
    ) -> WorkloadDraft:
        """Return the draft with ``change`` applied to its rows.

        ``only`` contains the indices of the rows to change. The default is all rows.
        """
        rows = (
            change(row) if only is None or index in only else row
            for index, row in enumerate(self.rows)
        )
        return replace(self, rows=tuple(rows))


def halve_fields(names: Iterable[str]) -> Callable[[ListedRequest], ListedRequest]:
    """Return a function that halves the fields with the given names, rounding up."""
    return lambda row: change_row(row, **{name: -(-getattr(row, name) // 2) for name in names})


def set_fields(values: dict[str, Any]) -> Callable[[ListedRequest], ListedRequest]:
    """Return a function that sets fields by name."""
    return lambda row: change_row(row, **values)


def round_arrivals(digits: int | None) -> Callable[[ListedRequest], ListedRequest]:
    """Return a function that rounds arrivals down to ``digits`` decimals. None sets them to 0."""

    def change(row: ListedRequest) -> ListedRequest:
        arrival = 0.0 if digits is None else int(row.arrival * 10**digits) / 10**digits
        shorter = (len(repr(arrival)), arrival) < (len(repr(row.arrival)), row.arrival)
        return change_row(row, arrival=arrival) if shorter else row

    return change
