"""Make a recorded case smaller as long as something still holds of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from simkv.proof.record.cases import DrawnCase
from simkv.schedulers.vllm.config import VllmConfig

#: Most cases that are tried: each is recorded.
TRIES = 600

#: Knobs that stay as they were drawn: they are sizes, or say who decides.
KEPT_KNOBS = {"name", "variant", "block_size", "num_gpu_blocks", "max_model_len"}


def shrunk(case: DrawnCase, holds: Callable[[DrawnCase], bool]) -> DrawnCase:
    """The smallest case found of which ``holds`` is true, as it is of ``case``."""
    left = TRIES
    found = True
    while found and left:
        found = False
        for smaller in _smaller(case):
            left -= 1
            if holds(smaller):
                case, found = smaller, True
                break
            if not left:
                break
    return case


def _smaller(case: DrawnCase) -> Iterator[DrawnCase]:
    """Cases with one thing less, the greatest steps first."""
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
        yield DrawnCase(case.config, earlier, [(step - first, *at) for step, *at in aborts])
    for abort in aborts:
        yield case._replace(aborts=[other for other in aborts if other is not abort])
    yield from (case._replace(config=config) for config in _plainer(case.config))
    for index, request in enumerate(requests):
        for change in _shorter(request):
            rest = [*requests]
            rest[index] = {**request, **change}
            yield case._replace(requests=rest)


def _plainer(config: VllmConfig) -> Iterator[VllmConfig]:
    """The config with one knob left at its default."""
    plain: dict[str, Any] = {field.name: field.default for field in fields(VllmConfig)}
    plain |= {"enable_prefix_caching": False, "async_scheduling": False}
    for knob, default in plain.items():
        if knob not in KEPT_KNOBS and getattr(config, knob) != default:
            try:
                yield replace(config, **{knob: default})
            except ValueError:  # start-up would refuse it
                continue


def _shorter(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A request with less to do, earlier, or like the others."""
    if request.get("lora"):
        yield {"lora": None}
    for field, least in (("arrival_step", 0), ("priority", 0)):
        if request[field] > least:
            yield {field: least}
    prompt, outputs = request["prompt_tokens"], request["output_tokens"]
    for tokens in sorted({1, prompt // 2, prompt - 1}):
        if 0 < tokens < prompt:
            yield {"prompt_tokens": tokens, "prompt_segments": _cut(request, tokens)}
    for tokens in sorted({1, outputs // 2, outputs - 1}):
        if 0 < tokens < outputs:
            yield {"output_tokens": tokens, "max_tokens": tokens}


def _cut(request: dict[str, Any], tokens: int) -> list[list[Any]]:
    """The beginning of a prompt as segments."""
    segments = []
    for stream, start, end in request["prompt_segments"]:
        if tokens > 0:
            segments.append([stream, start, min(end, start + tokens)])
        tokens -= end - start
    return segments
