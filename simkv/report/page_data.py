"""What the figures of a page are drawn from, for all variants: names, colours and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simkv.core.figures import REGISTRY
from simkv.core.outcome import Outcome
from simkv.measure.metrics import e2e, ttft
from simkv.measure.result import Result
from simkv.report import data, story
from simkv.report.lanes import BARS
from simkv.report.published import Comparison, compare
from simkv.report.style import FAILED, span
from simkv.schedulers.registry import spec_of
from simkv.why.ledger import SERVED, WORDS, Kind, totals

SYMBOLS = {
    "X": "x",
    "s": "square",
    "P": "cross",
    "D": "diamond",
    ">": "triangle-right",
    "v": "triangle-down",
}
CAUSES = {
    "blocks": "too few blocks were free",
    "bucket": "its length was not that of those that run",
    "patience": "the head of the queue had waited too long",
}


def columns(results: Mapping[str, Result], pair: Sequence[str]) -> dict[str, Any]:
    """What the scripts draw from."""
    records = {name: result.record for name, result in results.items()}
    end = span(records.values()) or 1.0
    ticks = data.Ticks(end)
    edges = data.bins(end)
    shows = [data.stretches(r.record, r.diagnosis.ledger) for r in results.values()]
    room = data.shares([sum(map(len, lanes.values())) for lanes in shows], data.STRETCHES)
    latencies = [
        life.ended_at - life.request.arrival
        for r in records.values()
        for life in r.lives.values()
        if life.ended_at is not None
    ]
    return {
        "name": next(iter(results.values())).scenario.name,
        "title": story.title(results),
        "tick": ticks.seconds,
        "end": end,
        "slowest": max([*latencies, 1e-9]),
        "edges": [round(edge, 9) for edge in edges.tolist()],
        "pair": [list(results).index(name) for name in pair],
        "kinds": [
            {"key": code, "served": code in SERVED, "life": code in list(Kind)}
            for code in data.CODES
        ],
        "words": {kind: label for kind, (label, _) in BARS.items()}
        | {kind.value: words for kind, words in WORDS.items()},
        "causes": CAUSES,
        "outcomes": [_outcome(outcome) for outcome in Outcome],
        "vain": [outcome.vain for outcome in Outcome],
        "published": [
            row for comparison in compare(dict(results)) if (row := error_row(comparison, results))
        ],
        "variants": [
            _variant(name, result, ticks, edges)
            | {
                "lanes": data.lanes(result.record, lanes, ticks, most),
                "arrows": data.arrows(result.record, result.diagnosis, ticks, most // 10),
            }
            for (name, result), lanes, most in zip(results.items(), shows, room, strict=True)
        ],
    }


def _variant(name: str, result: Result, ticks: data.Ticks, edges: data.Floats) -> dict[str, Any]:
    record, found, engine = result.record, result.diagnosis, result.scenario.engine
    lives = list(record.lives.values())
    stop = record.standstill
    sums = totals(interval for lane in found.ledger.values() for interval in lane)
    return {
        "name": name,
        "served": story.served(record),
        "until": span([record]) or 1.0,
        "standstill": None if stop is None else {"kind": stop.kind, "since": stop.since},
        "requests": data.requests(record, ticks),
        "owners": data.owners(record, spec_of(engine).block_size(engine), edges),
        "courses": data.courses(record, edges),
        "curves": {
            "ttft": data.curve(map(ttft, lives), len(lives)),
            "e2e": data.curve(map(e2e, lives), len(lives)),
        },
        "totals": [data.short(sums.get(kind, 0.0), 9) for kind in Kind] + [0, 0],
        "blockers": [
            [b.id, data.short(b.seconds), data.short(b.block_seconds)] for b in found.blockers[:50]
        ],
        "blocked": data.blocked(record, found),
    }


def _outcome(outcome: Outcome) -> dict[str, str]:
    """How the page says and marks an outcome."""
    mark = FAILED.get(outcome)
    in_vain = {Outcome.STARVED: "red", Outcome.TIMED_OUT: "brown"}.get(outcome, "purple")
    return {
        "key": outcome.value,
        "word": outcome.word,
        "label": outcome.label,
        "symbol": SYMBOLS[mark.marker] if mark else "circle",
        "colour": in_vain if mark else "blue",
    }


def error_row(row: Comparison, results: Mapping[str, Result]) -> dict[str, Any] | None:
    """A published figure with the error of ours in percent, where it has one."""
    if row.error is None:
        return None
    rms = results[row.variant].profile.fit.rms_s
    bar = None
    if rms is not None and row.published and (scale := _per_second(row.figure)):
        bar = 100.0 * rms * scale / abs(row.published)
    return {
        "variant": row.variant,
        "figure": row.figure,
        "published": row.published,
        "simulated": row.simulated,
        "error": 100.0 * row.error,
        "bar": bar,
    }


def _per_second(name: str) -> float | None:
    """How many units of a published figure are a second; None if it is no time."""
    if metric := REGISTRY.get(name):
        return metric.per_second
    return 1.0 if name.endswith("_s") else None  # of one request
