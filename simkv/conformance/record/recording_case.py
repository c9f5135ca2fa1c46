"""A workload for recording an engine's released scheduler, and the structure of such workloads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simkv.core.recording_format import RecordingLine


class RecordingCase(NamedTuple):
    """Configuration, requests and aborts of a recording.

    ``aborts`` are tuples (step, phase, request id). The other fields are lists of durations in
    steps: ``copies`` for KV copies to and from host memory, ``disk`` for transfers to and from a
    disk, ``looks`` for lookups on the disk, and ``transfers`` for KV transfers between replicas.
    The first operation takes the first duration, and so on; after the last duration, the list
    starts again.
    """

    config: Any
    requests: list[RecordingLine]
    aborts: Sequence[tuple[int, int, int]] = ()
    copies: Sequence[int] = ()
    disk: Sequence[int] = ()
    looks: Sequence[int] = ()
    transfers: Sequence[int] = ()

    @property
    def header_fields(self) -> RecordingLine:
        """The lists of durations that are not empty, by their field names in the header of a
        recording.
        """
        said = {"copies": self.copies, "disk": self.disk, "looks": self.looks}
        said["transfers"] = self.transfers
        return {name: steps for name, steps in said.items() if steps}


@dataclass(frozen=True)
class CaseSchema:
    """Structure of the cases of an engine, used to shrink and display a case.

    When a case is shrunk, the settings in ``kept`` do not change, because they are sizes or select
    a scheduler. All other settings are reset to their values in ``plain`` or, if missing there, to
    their defaults. ``cut(request, tokens)`` returns the fields that change if the prompt of a
    request is shortened to ``tokens``. ``limit`` is the name of the field with the maximum number
    of output tokens. ``idle`` contains the fields that may be 0. ``columns`` maps table headings to
    functions that return the cell of a request. ``unnamed`` contains the settings that have other
    names in the engine.
    """

    kept: Collection[str]
    plain: Mapping[str, Any]
    cut: Callable[[RecordingLine, int], RecordingLine]
    limit: str
    idle: Sequence[str]
    columns: Mapping[str, Callable[[RecordingLine], str]] = field(default_factory=dict)
    unnamed: Collection[str] = ()

    def simplify_request(self, request: RecordingLine) -> Iterator[RecordingLine]:
        """Yield dictionaries of changed fields; each one makes a request smaller, earlier or
        simpler.
        """
        for name in ("lora", "routing_key", "logprobs_from"):
            if request.get(name) is not None:
                yield {name: None}
        for name in self.idle:
            if request.get(name, 0) > 0:
                yield {name: 0}
        prompt, outputs = request["prompt_tokens"], request["output_tokens"]
        for tokens in sorted({1, prompt // 2, prompt - 1}):
            if 0 < tokens < prompt:
                yield {"prompt_tokens": tokens, **self.cut(request, tokens)}
        for tokens in sorted({1, outputs // 2, outputs - 1}):
            if 0 < tokens < outputs:
                yield {"output_tokens": tokens, self.limit: tokens}


def field_column(name: str) -> Callable[[RecordingLine], str]:
    """Return a function that returns the field ``name`` of a request as text for a table column."""
    return lambda request: str(request[name])
