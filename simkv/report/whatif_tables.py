"""Output of ``simkv bisect`` and ``simkv whatif``: lines, tables and JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import isnan
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from simkv.core.figure_registry import METRICS, heading
from simkv.report.adaptive_table import AdaptiveTable, Column
from simkv.report.narrative import LOWER_BOUND_NOTE
from simkv.study.whatif.candidate_changes import Change
from simkv.study.whatif.outcome_predicate import FigureCondition, RunCondition
from simkv.study.whatif.trial_evaluation import RunFigures
from simkv.study.whatif.verdict_bisection import Flip, Flips, TriedValue
from simkv.study.whatif.whatif import Effect, WhatIfResult

#: Metrics of ``summary.json`` in the JSON of a run.
JSON_FIGURES = (
    "requests",
    "finished",
    "starved",
    "timed_out",
    "stalled",
    "rejected",
    "lost",
    "cut_off",
    "makespan_s",
    "preemptions",
    "recomputed_tokens",
    "longest_stall_s",
    "ttft_ms.median",
    "ttft_ms.p99",
    "e2e_ms.median",
    "e2e_ms.mean",
    "e2e_ms.p99",
    "ttft_all_ms.median",
    "ttft_all_ms.p99",
    "e2e_all_ms.median",
    "e2e_all_ms.mean",
    "e2e_all_ms.p99",
)
#: Columns of the tables; times are in seconds.
_COLUMNS = (
    "finished",
    "starved",
    "timed_out",
    "stalled",
    "ttft_all_ms.median",
    "ttft_all_ms.p99",
    "output_throughput",
    "e2e_all_ms.median",
    "longest_stall_s",
    "preemptions",
)
#: Columns that are omitted last if space is short, the most important first.
_KEPT = ("finished", "ttft_all_ms.p99", "ttft_all_ms.median", "output_throughput")
#: Rank of the columns with the numbers of requests that a change helps and hurts.
_REQUESTS_RANK = 2 + len(_KEPT) + 1


def render_flips(found: Flips, when: RunCondition | None = None) -> Iterator[RenderableType]:
    """Yield a sentence per change of the result, then a table of all evaluated values.

    ``when`` is the compared result; by default, the verdict.
    """
    figure = when.figure if isinstance(when, FigureCondition) else None
    for flip in found.flips:
        yield _flip(found, flip)
    if not found.flips:
        yield f"{found.path}: no change found; {found.samples[0].state} for all values."
    yield _sampling(found)
    new_states = {id(flip.high) for flip in found.flips}
    samples = found.samples
    yield AdaptiveTable(
        [
            Column(found.path, [_word(sample.value) for sample in samples], right=False),
            Column("Shown" if when else "Ending", [x.state for x in samples], right=False),
            *_columns([sample.figures for sample in samples], figure),
        ],
        frozenset(row for row, sample in enumerate(samples) if id(sample) in new_states),
    )
    yield from _lower_bound_notes(sample.figures for sample in samples)
    for sample in found.samples:
        if sample.refused:
            yield f"{_word(sample.value)} is not allowed: {sample.refused}"


def _flip(found: Flips, flip: Flip) -> str:
    low, high = flip.low, flip.high
    between = "" if found.complete or found.values == len(found.samples) else ", or between them"
    return (
        f"{found.path}: {low.state} at {_word(low.value)}, "
        f"{high.state} at {_word(high.value)}{between}"
    )


def _sampling(found: Flips) -> str:
    tried = len(found.samples)
    if tried == found.values:
        return f"All {tried} values were tried."
    more = tried - found.sampled
    text = f"{found.sampled} of {found.values} values sampled, and {max(more, 0)} more near changes"
    if not found.complete:
        return f"{text} before the limit on runs was reached; the exact values are not determined."
    return f"{text}. Changes that revert between two sampled values are not detected."


#: Maximum number of fields that a line names without ``--all``.
NAMED_FIELDS = 5


def render_whatif(found: WhatIfResult, everything: bool = False) -> Iterator[RenderableType]:
    """Yield the answer in one line, then the changes that help, hurt, or change little."""
    best = found.best
    if found.unfinished:
        tried = len(found.effects)
        yield f"Interrupted: {tried} of {tried + found.unfinished} changes have a result."
    yield f"Unchanged: {found.base.summary}"
    if found.cause:
        yield Text(f"Cause of the rejection: {found.cause}")
    if best is None:
        yield f"None of the {len(found.effects)} single changes helps."
    else:
        yield Text(f"Best single change: {best.sentence}")
    if best and best.change.kind == "memory":
        others = [e for e in found.with_judgement("fixes", "helps") if e.change.kind != "memory"]
        if others:
            yield Text(f"Best change without more memory: {others[0].sentence}")
    effects = found.with_judgement("fixes", "helps", "changes little", "hurts")
    shown = effects if everything else _one_per_field(effects)
    rows = _with_equal_effects(shown)
    shown = [row[0] for row in rows]
    runs = [found.base, *(effect.figures for effect in shown)]
    endings = [run.verdict for run in runs]
    helped = [str(len(x.newly_finished) + len(x.faster)) for x in shown]
    hurt = [str(len(x.newly_failed) + len(x.slower)) for x in shown]
    rank = _REQUESTS_RANK - 1 if len(set(endings)) > 1 else _REQUESTS_RANK + 1
    changes = [_join(row, everything) for row in rows]
    yield AdaptiveTable(
        [
            Column("", ["", *(x.judgement for x in shown)], right=False, width=7),
            Column("Change", ["none", *changes], right=False, width=18),
            # The first line states how the runs end if this is the same for all.
            Column("Ending", endings, rank, right=False),
            *_columns(runs, found.by),
            Column("Helped", ["", *helped], _REQUESTS_RANK),
            Column("Hurt", ["", *hurt], _REQUESTS_RANK),
        ]
    )
    yield from _lower_bound_notes(runs)
    if more := len(effects) - sum(map(len, rows)):
        yield f"{more} more value{'s' * (more > 1)} of these fields: --all, --json"
    if same := found.with_judgement("changes nothing"):
        at_work = {effect.change.field for effect in effects}
        names = _fields((effect.change for effect in same), at_work, everything)
        yield Text(f"No effect: {names}")
    if found.skipped:
        at_work = {effect.change.field for effect in found.effects}
        yield Text(
            "Not tried, because smaller changes of the same field served fewer requests: "
            f"{_fields(found.skipped, at_work, everything)}"
        )
    if found.refused:
        allowed = {effect.change.field for effect in found.effects}
        refused = (change for change, _ in found.refused)
        yield Text(f"Not allowed: {_fields(refused, allowed, everything)}")


def _with_equal_effects(effects: Iterable[Effect]) -> list[list[Effect]]:
    """Return groups of effects with equal results, in order of their first effect."""
    groups: list[list[Effect]] = []
    for effect in effects:
        same = (group for group in groups if group[0].figures == effect.figures)
        group = next(same, None)
        if group is None:
            groups.append([effect])
        else:
            group.append(effect)
    return groups


def _join(row: Sequence[Effect], everything: bool) -> str:
    """Return changes with equal results as text; only the first one unless ``everything``."""
    names = [str(effect.change) for effect in row]
    if everything or len(names) == 1:
        return "; ".join(names)
    return f"{names[0]} (and {len(names) - 1} more)"


def _one_per_field(effects: Iterable[Effect]) -> list[Effect]:
    """Return the effects to show: all variants, and the best value of each field.

    For each field, the first value that does not help is also shown.
    """
    seen: set[tuple[str, bool]] = set()
    kept = []
    for effect in effects:
        helps = effect.judgement in ("fixes", "helps")
        key = (effect.change.field, helps)
        if effect.change.kind == "variant" or key not in seen:
            kept.append(effect)
        seen.add(key)
    return kept


def _fields(changes: Iterable[Change], others: Collection[str], everything: bool) -> str:
    """Return the names of the changed fields. Fields in ``others`` are listed with their values.

    Unless ``everything`` is set, only the first fields are named.
    """

    def said(change: Change) -> str:
        if change.kind == "variant":
            return f"variant {change.after}"
        return str(change) if change.field in others else change.field

    named = list(dict.fromkeys(map(said, changes)))
    if everything or len(named) <= NAMED_FIELDS + 1:
        return ", ".join(named)
    return f"{', '.join(named[:NAMED_FIELDS])} and {len(named) - NAMED_FIELDS} more (--all, --json)"


def _columns(rows: Sequence[RunFigures | None], figure: str | None) -> list[Column]:
    """Return the metrics of runs as columns, without outcomes that no run has."""
    cells = zip(*(_cells(row, figure) for row in rows), strict=True)
    columns = zip(_headings(figure), map(list, cells), strict=True)
    rare = [METRICS[name].heading_in_seconds for name in ("timed_out", "stalled")]
    kept = [(head, list_) for head, list_ in columns if head not in rare or {*list_} - {"0", ""}]
    first = [METRICS[name].heading_in_seconds for name in _KEPT]
    if figure:
        first.insert(0, heading(figure))
    ranks = {head: rank for rank, head in enumerate(first)}
    return [
        Column(head, list_, 2 + ranks.get(head, _REQUESTS_RANK + place))
        for place, (head, list_) in enumerate(kept)
    ]


def _headings(figure: str | None) -> list[str]:
    return [
        *([heading(figure)] if figure else []),
        *(METRICS[n].heading_in_seconds for n in _COLUMNS),
    ]


def _cells(figures: RunFigures | None, figure: str | None) -> list[str]:
    if figures is None:
        return [""] * (len(_COLUMNS) + (figure is not None))
    cells = []
    if figure:
        cells.append("none" if isnan(figures[figure]) else f"{figures[figure]:.6g}")
    for name in _COLUMNS:
        metric, value = METRICS[name], figures[name]
        told = f"{metric.to_seconds(value):.{2 if metric.per_second else 0}f}"
        mark = "> " if name in figures.lower_bounds else ""
        cells.append("" if isnan(value) else mark + told)
    return cells


def _lower_bound_notes(rows: Iterable[RunFigures | None]) -> Iterator[str]:
    if any(name in row.lower_bounds for row in rows if row for name in _COLUMNS):
        yield LOWER_BOUND_NOTE


def _word(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def flips_json(found: Flips) -> dict[str, Any]:
    """Return all evaluated values and the changes of the result between them, as plain data."""
    return {
        "path": found.path,
        "values": found.values,
        "sampled": found.sampled,
        "complete": found.complete,
        "runs": found.runs,
        "flips": [
            {
                "below": {"value": flip.low.value, "state": flip.low.state},
                "above": {"value": flip.high.value, "state": flip.high.state},
            }
            for flip in found.flips
        ],
        "samples": [_sample_json(sample) for sample in found.samples],
    }


def _sample_json(sample: TriedValue) -> dict[str, Any]:
    plain: dict[str, Any] = {"value": sample.value, "state": sample.state}
    if sample.figures is None:
        return {**plain, "refused": sample.refused}
    return {**plain, **figures_json(sample.figures)}


def whatif_json(found: WhatIfResult) -> dict[str, Any]:
    """Return all changes, the best first, as plain data."""
    return {
        "base": figures_json(found.base),
        "cause": found.cause,
        "by": found.by,
        "best": found.best.sentence if found.best else None,
        "runs": found.runs,
        "unfinished": found.unfinished,
        "changes": [
            {
                "kind": effect.change.kind,
                "field": effect.change.field,
                "before": effect.change.before,
                "after": effect.change.after,
                "judgement": effect.judgement,
                "sentence": effect.sentence,
                "newly_finished": effect.newly_finished,
                "newly_failed": effect.newly_failed,
                "faster": effect.faster,
                "slower": effect.slower,
                "e2e_ratio": effect.e2e_ratio,
                **figures_json(effect.figures),
            }
            for effect in found.effects
        ],
        "skipped": [{"field": c.field, "after": c.after} for c in found.skipped],
        "refused": [
            {"field": change.field, "after": change.after, "why": why}
            for change, why in found.refused
        ],
    }


def figures_json(figures: RunFigures) -> dict[str, Any]:
    """Return the verdict and the main metrics of a run."""
    return {
        "verdict": figures.verdict,
        "verdict_detail": figures.detail,
        "figures": {name: figures.values[name] for name in JSON_FIGURES},
        "lower_bounds": [name for name in JSON_FIGURES if name in figures.lower_bounds],
    }
