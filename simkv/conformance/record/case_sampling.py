"""Sample the parts of a case that all engines have in common: settings, requests and aborts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from simkv.core.request import Request, Segment

#: Numbers of steps between two arrivals.
GAPS: Sequence[Any] = (0, 0, 0, 1, 2, range(31))


def sample(draw: Random, choices: Sequence[Any]) -> Any:
    """Return one of ``choices``; a range among them stands for one of its numbers."""
    chosen = draw.choice(choices)
    return draw.choice(chosen) if isinstance(chosen, range) else chosen


def sample_settings(draw: Random, table: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return a value for each setting in ``table``, which lists the choices by setting."""
    return {name: sample(draw, choices) for name, choices in table.items()}


def case_numbers(kinds: Sequence[str], count: int) -> list[str]:
    """Return ``count`` names of cases, each with a kind and a number; the kinds alternate."""
    return [f"{kinds[i % len(kinds)]}-{i // len(kinds):03}" for i in range(count)]


def sample_requests(
    draw: Random,
    longest: int,
    gaps: Sequence[Any] = GAPS,
    longest_outputs: Sequence[int] = (4, 20, 60),
) -> list[Request]:
    """Return 2 to 14 requests with prompts of up to ``longest`` tokens; some share a prefix."""
    requests: list[Request] = []
    step = 0
    for i in range(draw.randint(2, 14)):
        step += sample(draw, gaps)
        prompt = draw.randint(1, min(longest, draw.choice([8, 40, 400])))
        output = draw.randint(1, draw.choice(longest_outputs))
        common = draw.choice([0, draw.randint(0, prompt)])
        parts = (
            Segment(draw.choice(["g0", "g1"]), 0, common),
            Segment(f"u{i}", 0, prompt - common),
        )
        more = draw.choice([0, 0, 5, 40])
        requests.append(
            Request(
                id=i,
                arrival=float(step),
                prompt_tokens=prompt,
                output_tokens=output,
                max_tokens=output + more,
                ignore_eos=not more and draw.random() < 0.3,
                segments=tuple(part for part in parts if part.end),
            )
        )
    return requests


def add_follow_ups(draw: Random, requests: Sequence[Request], longest: int) -> list[Request]:
    """Add requests that continue others, with prompts of at most ``longest`` tokens."""
    found = [*requests]
    for r in draw.sample(requests, draw.randint(0, len(requests))):
        i, whole = len(found), r.prompt_tokens + r.output_tokens
        common = draw.choice([whole, whole, draw.randint(1, whole)])
        output = draw.randint(1, 12)
        if common >= longest:
            continue
        earlier = (*r.segments, Segment(f"o{r.id}", 0, r.output_tokens))
        found.append(
            replace(
                r,
                id=i,
                arrival=r.arrival + draw.randint(0, 60),
                prompt_tokens=common + 1,
                output_tokens=output,
                max_tokens=output,
                segments=(*cut_segments(earlier, common), Segment(f"u{i}", 0, 1)),
            )
        )
    return sorted(found, key=lambda r: (r.arrival, r.id))


def cut_segments(segments: Sequence[Segment], tokens: int) -> tuple[Segment, ...]:
    """Return the segments of the first ``tokens`` tokens of a prompt."""
    kept = list[Segment]()
    for stream, start, end in segments:
        if tokens > 0:
            kept.append(Segment(stream, start, min(end, start + tokens)))
        tokens -= end - start
    return tuple(kept)


def add_adapters(draw: Random, requests: Sequence[Request], names: Sequence[str]) -> list[Request]:
    """Return the requests with LoRA adapters from ``names``; an empty name means no adapter."""
    return [replace(request, lora=draw.choice(names) or None) for request in requests]


def sample_aborts(
    draw: Random, requests: Sequence[Request], phases: int = 3
) -> list[tuple[int, int, int]]:
    """Return (step, phase, request id) of the aborts of about half of the requests."""
    return sorted(
        (
            max(int(r.arrival) + draw.randint(-1, 3 * r.output_tokens), 0),
            draw.randrange(phases),
            r.id,
        )
        for r in requests
        if draw.random() < 0.6
    )


def sample_durations(draw: Random, choices: Sequence[Any]) -> list[int]:
    """Return one to seven durations in steps, which a recording uses in turn."""
    return [sample(draw, choices) for _ in range(draw.randint(1, 7))]
