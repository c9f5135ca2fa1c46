"""Convert received requests to a scenario or a trace, which can be simulated again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simkv.core.atomic_files import atomic_file
from simkv.core.request import Request
from simkv.scenario.scenario import Scenario
from simkv.workload.formats.simkv_csv import used_columns, write_file
from simkv.workload.listed_requests import ListedRequest, acceptance_fields
from simkv.workload.request_columns import PromptPieces, RequestRows, piece_from_segment
from simkv.workload.trace_selection import Selection
from simkv.workload.trace_source import TraceSource
from simkv.workload.workload_section import Workload


def recorded_scenario(
    scenario: Scenario, requests: Sequence[Request], until: float | None = None
) -> Scenario:
    """Return the scenario with the received requests as its workload.

    If ``until`` (s) is given, the simulation is cut off at that time.
    """
    listed = [
        ListedRequest(
            arrival=request.arrival,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            max_tokens=request.max_tokens,
            priority=request.priority,
            ignore_eos=request.ignore_eos,
            lora=request.lora,
            routing_key=request.routing_key,
            logprobs_from=request.logprobs_from,
            timeout=request.timeout,
            **acceptance_fields(request),
            segments=list(request.segments) or None,
        )
        for request in requests
    ]
    changes = {"workload": Workload(requests=listed), "horizon": until}
    return scenario.model_copy(update=changes)


def write_recorded_trace(path: Path, requests: Sequence[Request]) -> None:
    """Write received requests as a simkv trace, completely or not at all. Raises InputError."""
    with atomic_file(path) as new:
        source = TraceSource(path, Selection())
        rows = _rows(requests, source)
        write_file(new, [rows], used_columns(rows, ["arrival"]), source)


def _rows(requests: Sequence[Request], source: TraceSource) -> RequestRows:
    pieces = [
        [piece_from_segment(s, source.streams) for s in _shared(request)] for request in requests
    ]
    return RequestRows(
        arrival=np.array([r.arrival for r in requests], np.float64),
        prompt_tokens=np.array([r.prompt_tokens for r in requests], np.int64),
        output_tokens=np.array([r.output_tokens for r in requests], np.int64),
        max_tokens=np.array([r.max_tokens for r in requests], np.int64),
        priority=np.array([r.priority for r in requests], np.int64),
        timeout=np.array([r.timeout or np.nan for r in requests], np.float64),
        ignore_eos=np.array([r.ignore_eos for r in requests], np.bool_),
        acceptance=np.array([_chance(r) for r in requests], np.float64),
        lora=np.array([-1 if r.lora is None else source.loras.number(r.lora) for r in requests]),
        pieces=PromptPieces.of(pieces),
    )


def _chance(request: Request) -> float:
    """Return the acceptance rate of drafts, or NaN if a trace cannot represent it."""
    rates = request.acceptance.rates if request.acceptance else np.nan
    return np.nan if isinstance(rates, tuple) else rates


def _shared(request: Request) -> Iterator[Any]:
    """Yield the segments of a prompt before its unique tokens, which a trace does not contain."""
    return (segment for segment in request.segments if segment.stream != f"u{request.id}")
