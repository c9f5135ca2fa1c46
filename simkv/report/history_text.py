"""Output of ``simkv bisect --git`` and ``--releases``: lines and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from simkv.core.figure_registry import METRICS
from simkv.study.history.history_bisection import Bisection
from simkv.study.history.revision_run import RevisionResult

Revision = TypeVar("Revision")
#: Maximum number of reasons of skipped revisions, of candidates and of diff lines that are printed.
LISTED = 5
DIFF_LINES = 80


def render_bisection(
    found: Bisection[Revision],
    kind: str,
    name: Callable[[Revision], str],
    describe: Callable[[Revision], Iterator[str]],
) -> Iterator[str]:
    """Yield lines with the change of the result, the revision that caused it, and the number of
    runs.

    ``kind`` is the plural noun for revisions, such as commits. ``name`` returns the name of a
    revision, and ``describe`` returns further information about a revision.
    """
    results, skipped = found.search.results, found.search.skipped
    if found.criterion is None:
        good, bad = found.good.figures, found.bad.figures
        yield f"No change: GOOD is {good.summary}; BAD is {bad.summary}."
    for change in found.changes:
        assert found.criterion is not None
        before, after = change.result_before, change.result_after
        state = found.criterion.state
        yield f"Change of {found.criterion.about}: {state(before)} → {state(after)}"
        yield f"  {name(found.revisions[change.before])}: {_shown(before, found)}"
        yield f"  {name(found.revisions[change.after])}: {_shown(after, found)}"
        suspects = [found.revisions[index] for index in change.candidates]
        if len(suspects) > 1:
            yield f"One of {len(suspects)} {kind}; the others cannot be run:"
            yield from (f"  {name(one)}" for one in suspects[:LISTED])
            if len(suspects) > LISTED:
                yield f"  … {len(suspects) - LISTED} more"
        yield from describe(suspects[-1])
    yield (
        f"{len(found.revisions):,} {kind} in the range: {len(results)} with a result, "
        f"{len(skipped)} skipped"
    )
    reasons = Counter(one.reason for one in skipped.values())
    for reason, count in reasons.most_common(LISTED):
        yield f"  skipped {count}: {reason}"


def bisection_json(
    found: Bisection[Revision], describe: Callable[[Revision], dict[str, Any]]
) -> dict[str, Any]:
    """Return a bisection as JSON values."""
    state = found.criterion.state if found.criterion else lambda _: "same"
    return {
        "criterion": found.criterion.about if found.criterion else None,
        "revisions": len(found.revisions),
        "samples": [
            {**describe(found.revisions[index]), "state": state(one), **_json(one)}
            for index, one in sorted(found.search.results.items())
        ],
        "skipped": [
            {**describe(found.revisions[index]), "reason": one.reason}
            for index, one in sorted(found.search.skipped.items())
        ],
        "flips": [
            {
                "before": describe(found.revisions[change.before]),
                "after": describe(found.revisions[change.after]),
                "candidates": [describe(found.revisions[index]) for index in change.candidates],
            }
            for change in found.changes
        ],
    }


def shorten_diff(text: str) -> Iterator[str]:
    """Yield the lines of a diff, at most ``DIFF_LINES``."""
    lines = [line for line in text.splitlines() if not line.startswith(("index ", "diff --git"))]
    yield from (f"  {line}" for line in lines[:DIFF_LINES])
    if len(lines) > DIFF_LINES:
        yield f"  … {len(lines) - DIFF_LINES} more lines"


def _shown(result: RevisionResult, found: Bisection[Any]) -> str:
    """Return a phrase with the verdict and the value of the compared metric."""
    figure = found.criterion.figure if found.criterion else None
    if figure is None or figure not in METRICS:
        return result.figures.summary
    metric = METRICS[figure]
    value = result.figures.values[figure]
    text = "none" if value is None else metric.format(value)
    return f"{result.figures.summary}, {metric.label} {text}"


def _json(result: RevisionResult) -> dict[str, Any]:
    figures: Sequence[str] = ("finished", "starved", "preemptions", "ttft_ms.p99", "e2e_ms.p99")
    return {
        "verdict": result.figures.verdict,
        "missed": list(result.missed),
        "figures": {name: result.figures.values[name] for name in figures},
    }
