"""Shrink a recorded case as long as it keeps a given property."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from simkv.conformance.record.case_sampling import cut_segments
from simkv.conformance.record.recording_case import CaseSchema, RecordingCase, default_settings
from simkv.core.recording_format import RecordingFormat, RecordingLine
from simkv.schedulers.engine_registry import ENGINES

#: Maximum number of cases that are tried; each of them is recorded.
MAX_TRIES = 600


def shrink_case(
    case: RecordingCase, form: CaseSchema, holds: Callable[[RecordingCase], bool]
) -> RecordingCase:
    """Return a smaller case for which ``holds`` is true, after at most ``MAX_TRIES`` tries."""
    tries, variants = 0, _smaller(case, form)
    while tries < MAX_TRIES and (smaller := next(variants, None)):
        tries += 1
        if holds(smaller):
            case, variants = smaller, _smaller(smaller, form)
    return case


def _smaller(case: RecordingCase, form: CaseSchema) -> Iterator[RecordingCase]:
    """Yield variants with one element removed or simplified, the largest reductions first."""
    requests, aborts = case.requests, case.aborts
    for request in reversed(requests):
        i = request["id"]
        rest = [other for other in requests if other is not request]
        if rest:
            gone = [abort for abort in aborts if abort[-1] != i]
            yield case._replace(requests=rest, aborts=gone)
    first = min(request["arrival_step"] for request in requests)
    if 0 < first <= min((step for step, _, _ in aborts), default=first):
        earlier = [{**r, "arrival_step": r["arrival_step"] - first} for r in requests]
        sooner = [(step - first, i, who) for step, i, who in aborts]
        yield case._replace(requests=earlier, aborts=sooner)
    for abort in aborts:
        yield case._replace(aborts=[other for other in aborts if other is not abort])
    yield from (case._replace(config=config) for config in _plainer(case.config, form))
    for index, request in enumerate(requests):
        for simpler in _simpler(request, ENGINES[case.config.name].recording):
            rest = [*requests]
            rest[index] = simpler
            yield case._replace(requests=rest)


def _simpler(line: RecordingLine, recording: RecordingFormat) -> Iterator[RecordingLine]:
    """Yield variants of a request; each is smaller, earlier or simpler."""
    for name in ("lora", "routing_key", "logprobs_from"):
        if line.get(name) is not None:
            yield {**line, name: None}
    for name in ("arrival_step", "priority"):
        if line.get(name, 0) > 0:
            yield {**line, name: 0}
    prompt, length, outputs = recording.prompt(line), line["prompt_tokens"], line["output_tokens"]
    for tokens in sorted({1, length // 2, length - 1}):
        if 0 < tokens < length:
            segments = cut_segments(prompt.segments, tokens)
            shorter = replace(prompt, prompt_tokens=tokens, segments=segments)
            yield {**line, **recording.shown(shorter), "prompt_tokens": tokens}
    for tokens in sorted({1, outputs // 2, outputs - 1}):
        if 0 < tokens < outputs:
            shorter = replace(prompt, max_tokens=tokens)
            yield {**line, **recording.shown(shorter), "output_tokens": tokens}


def _plainer(config: Any, form: CaseSchema) -> Iterator[Any]:
    """Yield variants of a configuration, each with one setting reset to its default."""
    for knob, default in {**default_settings(config), **form.plain}.items():
        if knob not in form.kept and getattr(config, knob) != default:
            with contextlib.suppress(ValueError):  # rejected by the engine at start-up
                yield replace(config, **{knob: default})
