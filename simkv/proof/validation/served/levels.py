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

import simpy

from simkv.core.figures import figure
from simkv.costs.erring import Erring, Side, StepKind, kind_of, scales
from simkv.costs.error import by_kind
from simkv.costs.hardware.shapes import ModelShape
from simkv.costs.load import Executor, Load
from simkv.costs.profile import Profile, StepCost, StepError
from simkv.costs.simulated import SimulatedExecutor
from simkv.loop.engine import Engine
from simkv.loop.record import Record
from simkv.loop.serve import serve
from simkv.measure.metrics import summary
from simkv.proof.validation.compared import Compared
from simkv.proof.validation.served.baselines import baselines, roofline
from simkv.proof.validation.served.replay import Agreement, Recorded
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
class Validation:
    """L0 in ``verdict``; L1 by cost model and kind of step; L2 figure by figure.

    ``same_victims`` is by cost model the share of requests that were preempted in the run or in
    the simulation that were preempted in both.
    """

    verdict: Agreement
    steps: dict[str, dict[str, StepError]]
    figures: list[Compared]
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
            Compared(
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

    def named() -> Iterator[tuple[str, float]]:
        for (load, seconds), preempting in zip(run.steps, run.preempting, strict=True):
            swapping = load.swap_out_blocks or load.swap_in_blocks
            kinds = {kind_of(load): True, "all": True}
            kinds |= {"preempting": preempting, "swapping": bool(swapping)}
            error = cost(load) / seconds - 1.0
            yield from ((kind, error) for kind, there in kinds.items() if there)

    return by_kind(named())


def _victims(record: Record) -> set[int]:
    return {i for i, life in record.lives.items() if life.preempted_at}


def _overlap(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0
