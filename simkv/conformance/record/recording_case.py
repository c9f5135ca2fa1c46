"""A workload on which an engine's own scheduler is recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simkv.core.recording_format import RecordingLine


class RecordingCase(NamedTuple):
    """What is recorded: knobs, requests and ``aborts`` as (step, phase, request id); and how many
    steps ``copies`` of KV to and from host memory take, in turn, those of a ``disk``, and what is
    looked up there; or ``transfers`` of KV from and to other replicas."""

    config: Any
    requests: list[RecordingLine]
    aborts: Sequence[tuple[int, int, int]] = ()
    copies: Sequence[int] = ()
    disk: Sequence[int] = ()
    looks: Sequence[int] = ()
    transfers: Sequence[int] = ()

    @property
    def header_fields(self) -> RecordingLine:
        """When KV is there, as the header of a recording says it."""
        said = {"copies": self.copies, "disk": self.disk, "looks": self.looks}
        said["transfers"] = self.transfers
        return {name: steps for name, steps in said.items() if steps}


@dataclass(frozen=True)
class CaseSchema:
    """What the cases of an engine are made of, for who makes them smaller and shows them.

    Knobs in ``kept`` stay as they were drawn: they are sizes, or say who decides; the others become
    their defaults, or what ``plain`` says of them. ``cut`` gives the fields of a request whose
    prompt has so many tokens, ``limit`` is the field that says how many it may emit. Fields that a
    request can do with 0 of are ``idle``. ``columns`` of a table tell of a request by their names.
    """

    kept: Collection[str]
    plain: Mapping[str, Any]
    cut: Callable[[RecordingLine, int], RecordingLine]
    limit: str
    idle: Sequence[str]
    columns: Mapping[str, Callable[[RecordingLine], str]] = field(default_factory=dict)

    def simplify_request(self, request: RecordingLine) -> Iterator[RecordingLine]:
        """Fields of a request with less to do, earlier, or like the others."""
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
    """A column with a field of a request as it is."""
    return lambda request: str(request[name])
