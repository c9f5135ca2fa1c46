"""The costs of one run, the load of another: runs of one model and GPU predict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simkv.costs.profile import Profile
from simkv.proof.validation.cases.case import Case
from simkv.proof.validation.cases.score import Score, judge
from simkv.proof.validation.cases.simulate import engine_of


@dataclass(frozen=True)
class Crossed:
    """A run simulated with costs fitted to the requests that were alone in another."""

    costs_of: str
    score: Score


def others_load(scores: Sequence[Score], costs: Mapping[str, Profile]) -> Iterator[Crossed]:
    """All pairs of runs, each with requests alone, on one GPU with one model; ``costs`` by case."""
    fitted = [s.case for s in scores if costs[s.case.name].attention is None and s.case.has_alone]
    for case in fitted:
        for other in fitted:
            if case is not other and _same(case, other):
                found = judge(case, costs[other.name], *engine_of(case))
                yield Crossed(other.name, found)


def _same(one: Case, other: Case) -> bool:
    first, second = one.facts.engine, other.facts.engine
    return one.facts.model == other.facts.model and (
        (first.gpu, first.tensor_parallel, first.version)
        == (second.gpu, second.tensor_parallel, second.version)
    )


def crossed_rows(found: Sequence[Crossed]) -> Iterator[list[str]]:
    """A row for each pair: errors of the means, and figures in their interval."""
    for one in found:
        means = [one.score.figure(m, "mean") for m in ("ttft_ms", "tpot_ms", "e2e_ms")]
        held = [bool(f.held) for f in one.score.figures if f.interval and f.real > 1]
        errors = [f"{f.error_pct:+.2f}" for f in means]
        yield [one.score.case.name, one.costs_of, *errors, f"{sum(held)} of {len(held)}"]


CROSSED = ("load of", "costs of", "TTFT", "TPOT", "E2E", "in their interval")
