"""Three levels of comparison between a real run and the simulation, so that an error has a place.

L0  the simulation, fed the run's own step times, makes the same decisions
L1  the profile's step times against the measured ones, on the run's own decisions
L2  a simulation that runs freely with the profile, against the run

Two plain cost models stand beside the profile, fitted to the very run that they are judged by: the
best constant step, and the best straight line over the tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from simkv.engine import Engine, serve
from simkv.executors import Load
from simkv.executors.simulated import SimulatedExecutor
from simkv.gpu.replay import Recorded, Verdict
from simkv.metrics import figure, summary
from simkv.profile import Fit, Profile, StepCost, StepError, Term
from simkv.record import Record
from simkv.schedulers import build
from simkv.workload import clients

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
FIGURES = (
    "makespan_s",
    "output_throughput",
    *(
        f"{name}.{statistic}"
        for name in LATENCIES
        for statistic in ("mean", "median", "p90", "p99")
    ),
    "preemptions",
    "recomputed_tokens",
    "peak_blocks",
)


@dataclass(frozen=True)
class Figure:
    """A figure of the run, what each cost model makes of it, and of the run served again."""

    name: str
    real: float
    simulated: dict[str, float]
    again: float | None

    def error(self, model: str) -> float | None:
        """Relative error of a model; None where the run has 0 and the model has not."""
        return relative(self.simulated[model], self.real)


@dataclass(frozen=True)
class Validation:
    """L0 in ``verdict``; L1 by cost model and kind of step; L2 figure by figure.

    ``same_victims`` is by cost model the share of requests that were preempted in the run or in
    the simulation that were preempted in both.
    """

    verdict: Verdict
    steps: dict[str, dict[str, StepError]]
    figures: list[Figure]
    same_victims: dict[str, float]


def validation(run: Recorded, profile: Profile, again: Recorded | None = None) -> Validation:
    """Judge ``profile`` by a run; ``again`` is the same served once more."""
    profiles = {"profile": profile, **baselines(run, profile)}
    records = {name: simulate(run, p) for name, p in profiles.items()}
    real = figures_of(run.record)
    repeated = figures_of(again.record) if again else {}
    simulated = {name: figures_of(record) for name, record in records.items()}
    return Validation(
        run.verdict,
        {name: step_errors(run, StepCost(p)) for name, p in profiles.items()},
        [
            Figure(f, real[f], {name: s[f] for name, s in simulated.items()}, repeated.get(f))
            for f in FIGURES
        ],
        {name: _overlap(_victims(run.record), _victims(r)) for name, r in records.items()},
    )


def simulate(run: Recorded, profile: Profile) -> Record:
    """The run's scenario, simulated with ``profile``."""
    scenario = run.scenario
    executor = SimulatedExecutor(profile)
    engine = Engine(simpy.Environment(), build(scenario.engine), executor, scenario.engine_ready)
    return serve(engine, clients(scenario.workload, scenario.timeout), scenario.horizon)


def figures_of(record: Record) -> dict[str, float]:
    """The compared figures of a run, real or simulated."""
    found: dict[str, Any] = summary(record)
    free = record.steps.free_blocks
    found["peak_blocks"] = record.num_blocks - min(free, default=record.num_blocks)
    return {name: float(figure(found, name)) for name in FIGURES}


def step_errors(run: Recorded, cost: Callable[[Load], float]) -> dict[str, StepError]:
    """Relative errors of predicted step times by kind of step, of preempting steps, and of all."""
    kinds: dict[str, list[float]] = {}
    for (load, seconds), preempting in zip(run.steps, run.preempting, strict=True):
        kind = "decode"
        if load.prefill_seqs:
            kind = "mixed" if load.decode_seqs else "prefill"
        error = cost(load) / seconds - 1.0
        for name in (kind, "all", *(["preempting"] if preempting else [])):
            kinds.setdefault(name, []).append(error)
    return {kind: step_error(found) for kind, found in sorted(kinds.items())}


def step_error(errors: list[float]) -> StepError:
    """Summary of signed relative errors."""
    size = np.abs(errors)
    return StepError(
        points=len(errors),
        median=float(np.median(size)),
        p95=float(np.percentile(size, 95)),
        bias=float(np.mean(errors)),
    )


def baselines(run: Recorded, profile: Profile) -> dict[str, Profile]:
    """Plain cost models with the least relative error on this very run."""
    seconds = np.array([s for _, s in run.steps])
    tokens = np.array([load.prefill_tokens + load.decode_seqs for load, _ in run.steps])
    ones = np.ones(len(seconds))
    constant = float((1 / seconds).sum() / (1 / seconds**2).sum())
    rows = np.stack((ones, tokens), axis=1) / seconds[:, None]
    (base, slope), *_ = np.linalg.lstsq(rows, ones, rcond=None)
    fit = Fit(points=len(seconds), note="a baseline, fitted to the run that it is judged by")
    forms = {
        "constant step": [_line("constant", "steps", constant)],
        "tokens only": [
            _line("constant", "steps", max(float(base), 1e-9)),
            _line("tokens", "tokens", max(float(slope), 0.0)),
        ],
    }
    return {
        name: profile.model_copy(update={"name": name, "terms": terms, "fit": fit, "range": {}})
        for name, terms in forms.items()
    }


def _line(name: str, feature: str, seconds: float) -> Term:
    return Term.model_validate({"name": name, "feature": feature, "seconds": seconds})


def relative(found: float, real: float) -> float | None:
    """Relative error; 0 where both are 0, None where only the real one is."""
    if real == 0.0:
        return 0.0 if found == 0.0 else None
    return found / real - 1.0


def _victims(record: Record) -> set[int]:
    return {i for i, life in record.lives.items() if life.preempted_at}


def _overlap(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


def report(variant: str, found: Validation) -> Iterator[str]:
    """The tables as lines of text."""
    verdict = found.verdict
    same = "all the same" if verdict.step is None else f"parts at decision {verdict.step}"
    yield f"{variant}"
    yield f"  L0  {verdict.decisions} decisions, {same}"
    yield "  L1  error of step times (median, P95, bias)"
    for model, kinds in found.steps.items():
        for kind, error in kinds.items():
            shares = " ".join(_share(x) for x in (error.median, error.p95, error.bias))
            yield f"      {model:<14}{kind:<11}{shares}  of {error.points} steps"
    models = list(found.same_victims)
    noise = any(f.again is not None for f in found.figures)
    titles = [*models, *(["served again"] if noise else [])]
    yield f"  L2  {'':<22}{'run':>12} " + "".join(f"{title:>15}" for title in titles)
    for f in found.figures:
        errors = [f.error(model) for model in models]
        if f.again is not None:
            errors.append(relative(f.again, f.real))
        yield f"      {f.name:<22}{f.real:>12.3f} " + "".join(f"{_share(e):>15}" for e in errors)
    overlaps = "".join(f"{100 * found.same_victims[model]:>13.0f} %" for model in models)
    yield f"      {'same victims':<22}{'':>12} {overlaps}"


def _share(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"
