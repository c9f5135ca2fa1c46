"""Three levels of comparison between a real run and the simulation, so that an error has a place.

L0  the simulation, fed the run's own step times, makes the same decisions
L1  the profile's step times against the measured ones, on the run's own decisions
L2  a simulation that runs freely with the profile, against the run

Plain cost models stand beside the profile (see baselines.py), and the same scenario served again:
an error below the difference between two real runs is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from simkv.core.figures import figure
from simkv.costs.erring import Erring, Side, StepKind, kind_of, scales
from simkv.costs.load import Executor, Load
from simkv.costs.profile import Profile, StepCost, StepError
from simkv.costs.simulated import SimulatedExecutor
from simkv.lab.baselines import baselines, roofline
from simkv.lab.replay import Recorded, Verdict
from simkv.lab.shapes import ModelShape
from simkv.loop.engine import Engine, serve
from simkv.loop.record import Record
from simkv.measure.metrics import summary
from simkv.scenario.scenario import Scenario
from simkv.schedulers.registry import build, spec_of
from simkv.workload.workload import clients

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
    """A figure of the run, what each cost model makes of it, and of the run served ``again``.

    ``interval`` is what the profile's own error makes of the simulated one.
    """

    name: str
    real: float
    simulated: dict[str, float]
    again: list[float]
    interval: tuple[float, float] | None

    @property
    def held(self) -> bool | None:
        """Whether the run lies in the interval that the profile's error gives, if it gives one."""
        if self.interval is None:
            return None
        return self.interval[0] <= self.real <= self.interval[1]

    @property
    def noise(self) -> float | None:
        """The largest relative difference between the run and the same served again."""
        found = [relative(value, self.real) for value in self.again]
        known = [abs(x) for x in found if x is not None]
        return max(known) if known else None

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


def validation(run: Recorded, profile: Profile, again: Sequence[Recorded] = ()) -> Validation:
    """Judge ``profile`` by a run; ``again`` are the same served once more, or more often."""
    profiles = {"profile": profile, **baselines(run.steps, profile), **_roofline(run)}
    records = {name: simulate(run.scenario, p) for name, p in profiles.items()}
    real = figures_of(run.record)
    repeated = [figures_of(other.record) for other in again]
    simulated = {name: figures_of(record) for name, record in records.items()}
    ends = _ends(run.scenario, profile, simulated["profile"])
    return Validation(
        run.verdict,
        {name: step_errors(run, StepCost(p)) for name, p in profiles.items()},
        [
            Figure(
                f,
                real[f],
                {name: s[f] for name, s in simulated.items()},
                [other[f] for other in repeated],
                ends.get(f),
            )
            for f in FIGURES
        ],
        {name: _overlap(_victims(run.record), _victims(r)) for name, r in records.items()},
    )


def _roofline(run: Recorded) -> dict[str, Profile]:
    """The roofline of the device that the run was made on, if its ceilings were written down."""
    if "ceilings" not in run.about:
        return {}
    found, setup = run.about["ceilings"], run.about["setup"]
    shape = ModelShape(**setup["shape"])
    itemsize = 2 if setup["device"].startswith("cuda") else 4
    engine = run.scenario.engine
    block_size = spec_of(engine).block_size(engine)
    block = block_size * shape.kv_bytes_per_token(itemsize) / found["host_bytes_per_s"]
    device = (found["bytes_per_s"], found["flops_per_s"])
    return {"roofline": roofline(shape, itemsize, *device, block)}


def _ends(
    scenario: Scenario, profile: Profile, nominal: dict[str, float]
) -> dict[str, tuple[float, float]]:
    """Each figure's interval by the profile's error on held-out steps; nothing if it knows none."""
    errors = profile.fit.held_out
    if not errors:
        return {}
    sides: tuple[Side, ...] = ("cheaper", "dearer")
    runs = [nominal] + [
        figures_of(simulate(scenario, profile, scales(errors, side))) for side in sides
    ]
    return {name: (min(r[name] for r in runs), max(r[name] for r in runs)) for name in FIGURES}


def simulate(
    scenario: Scenario, profile: Profile, scale: Mapping[StepKind, float] | None = None
) -> Record:
    """The scenario, simulated with ``profile``, its steps dearer by ``scale`` if that is given."""
    executor: Executor = SimulatedExecutor(profile)
    if scale:
        executor = Erring(executor, scale)
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
        error = cost(load) / seconds - 1.0
        more = ["preempting"] if preempting else []
        if load.swap_out_blocks or load.swap_in_blocks:
            more.append("swapping")
        for name in (kind_of(load), "all", *more):
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
            shares = " ".join(f"{share(x):>10}" for x in (error.median, error.p95, error.bias))
            yield f"      {model:<14}{kind:<11}{shares}  of {error.points} steps"
    models = list(found.same_victims)
    titles = [*models, "noise", "interval"]
    yield f"  L2  {'':<22}{'run':>12} " + "".join(f"{title:>14}" for title in titles)
    for f in found.figures:
        errors = [*(f.error(model) for model in models), f.noise]
        held = {None: "-", True: "holds", False: "does not"}[f.held]
        shares = "".join(f"{share(e):>14}" for e in errors)
        yield f"      {f.name:<22}{f.real:>12.3f} {shares}{held:>14}"
    overlaps = "".join(f"{100 * found.same_victims[model]:>12.0f} %" for model in models)
    yield f"      {'same victims':<22}{'':>12} {overlaps}"


def share(error: float | None) -> str:
    """A relative error as a percentage with its sign."""
    return "-" if error is None else f"{100 * error:+.1f} %"
