"""Devices with known step costs in place of a GPU, to test campaign, fit and validation plan.

python -m tests.gpu.synthetic_devices 50 [PROCESSES [FIRST]]

This prints one line per device, from number FIRST (default: 0), and the totals. The true cost does
not have the form of the fit. Matrix products run in waves of tiles or are limited by bandwidth,
with a smooth transition. The bandwidth of attention depends on the number of programs, and a step
waits for its longest row. Parts of a step overlap a little, and serving adds the host and cold
caches. All numbers are sampled for each device around values of an H100 with an 8B model. Four of
five devices have an effect that no profile can represent; see ``EFFECTS``. Neither the campaign nor
the fit imports this module.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import simpy

from simkv.core.scheduler_protocol import BatchRow
from simkv.costs.cost_profile import CostProfile
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.costs.step_load import StepLoad
from simkv.gpu import campaign
from simkv.gpu.batch_inputs import StepSize
from simkv.gpu.calibration_runs import evaluation_loads, fit_load
from simkv.gpu.campaign import Measurement, measure
from simkv.gpu.campaign_plan import Limits, Probe, plan_campaign
from simkv.gpu.gpu_calibration import fit_host, real_steps
from simkv.gpu.graph_buckets import step_size
from simkv.gpu.profile_fit import (
    fit_overlapped,
    fit_profile,
    fit_synchronous,
    points_by_part,
)
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.simulation import simulate_with_profile
from simkv.validation.figure_comparison import FigureComparison
from simkv.validation.gpu_runs.baseline_models import (
    TrainingStep,
    fit_baselines,
    profile_model,
    with_host,
)
from simkv.validation.gpu_runs.comparison_levels import (
    IntervalScore,
    figure_intervals,
    figures_of,
    score_intervals,
    steady_steps,
)
from simkv.validation.gpu_runs.load_sizing import PlanScale, Trial, scale_of
from simkv.validation.gpu_runs.nominal_costs import nominal_profile
from simkv.validation.gpu_runs.timed_replay import Agreement, GpuRun
from simkv.validation.gpu_runs.validation_suite import OVERLAPPED, SYNCHRONOUS, plan_trials
from simkv.workload.workload_section import build_clients

SHAPE = MODEL_SHAPES["llama-3-8b"]
LIMITS = Limits()
#: Columns and rows of the weights of a layer, and of the head.
PRODUCTS = [
    (SHAPE.qkv_width, SHAPE.hidden),
    (SHAPE.hidden, SHAPE.hidden),
    (2 * SHAPE.intermediate, SHAPE.hidden),
    (SHAPE.hidden, SHAPE.intermediate),
]
#: Effects by device number: none; attention of decodes in waves of programs; another attention
#: kernel above some context; a clock that decreases under sustained load; all three effects.
EFFECTS = ("none", "waves", "switch", "throttle", "all")


class Nature(NamedTuple):
    """Properties of a device: rates, latencies (s) and fractions.

    ``event_s`` is the host time between the begin event of a synchronous step and its first kernel.
    """

    bandwidth: float
    flops: float
    processors: int
    knee: float
    launch_s: float
    fill: float
    row_rate: float
    overlap: float
    cold_s: float
    host_s: float
    host_row_s: float
    host_prefill_s: float
    event_s: float
    waves: float
    switch_at: int
    switch: float
    throttle: float


def sample_nature(seed: int, effect: str = "none") -> Nature:
    """Return a device similar to an H100, with one of ``EFFECTS``."""
    random = np.random.default_rng(seed)

    def about(value: float, share: float = 0.3) -> float:
        return value * float(np.exp(random.uniform(-share, share)))

    nature = Nature(
        bandwidth=about(2.9e12),
        flops=about(6.5e14),
        processors=int(random.choice([108, 114, 132, 142])),
        knee=float(random.uniform(3.0, 8.0)),
        launch_s=about(2.5e-6),
        fill=about(60.0),
        row_rate=about(1.6e10),
        overlap=float(random.uniform(0.0, 0.03)),
        cold_s=about(1.5e-4),
        host_s=about(4e-4),
        host_row_s=about(4e-6),
        host_prefill_s=about(2e-4),
        event_s=about(3e-5),
        waves=float(random.uniform(0.3, 0.8)),
        switch_at=int(random.uniform(500, 1500)),
        switch=float(random.uniform(-0.3, 0.3)),
        throttle=float(random.uniform(0.04, 0.12)),
    )
    absent: dict[str, Any] = {"waves": 0.0, "switch": 0.0, "throttle": 0.0}
    if effect == "all":
        return nature
    return nature._replace(**{name: zero for name, zero in absent.items() if name != effect})


@dataclass
class Disturbance:
    """Noise, drift (relative slowdown at the end of the campaign) and rare stalls."""

    random: np.random.Generator
    noise: float = 0.0
    drift: float = 0.0
    stalls: float = 0.0
    stalled: int = 0

    def apply(self, seconds: float, progress: float = 0.0) -> float:
        """Return the measured time of a step at the fraction ``progress`` of the campaign."""
        seconds *= 1.0 + self.drift * progress
        if self.noise:
            seconds *= float(np.exp(self.random.normal(0.0, self.noise)))
        if self.stalls and self.random.random() < self.stalls:
            self.stalled += 1
            seconds += float(self.random.uniform(0.03, 0.2))
        return seconds


@dataclass
class Device:
    """A device with a known duration for any part of any step."""

    nature: Nature
    disturbance: Disturbance = field(default_factory=lambda: Disturbance(np.random.default_rng(0)))

    def soft_maximum(self, *seconds: float) -> float:
        """Return the maximum, or slightly more where the values are similar."""
        knee = self.nature.knee
        return float(sum(s**knee for s in seconds) ** (1.0 / knee))

    def rest(self, size: StepSize) -> float:
        """Return the time of a step without attention."""
        layers = sum(self._product(size.tokens, n, k) for n, k in PRODUCTS) * SHAPE.layers
        head = self._product(size.decodes + size.prefills, SHAPE.vocab, SHAPE.hidden)
        moved = 40 * size.tokens * SHAPE.hidden * 2 / self.nature.bandwidth
        return layers + head + SHAPE.layers * (9 * self.nature.launch_s + moved / 8)

    def _product(self, m: int, n: int, k: int) -> float:
        one = self.nature
        tiles = -(-m // 128) * -(-n // 128)
        waves = -(-tiles // one.processors)
        tile = 2 * 128 * 128 * k / (one.flops / one.processors)
        return self.soft_maximum(waves * tile, 2 * n * k / one.bandwidth) + one.launch_s

    def decodes(self, contexts: Sequence[int], size: StepSize) -> float:
        """Return the attention time (s) of decode rows, split as the runner splits them."""
        if not contexts:
            return 0.0
        rows = min(size.decodes, 32) if size.prefills else size.decodes
        splits = min(1 << max(-(-528 // (rows * SHAPE.kv_heads)) - 1, 0).bit_length(), 64)
        one, token = self.nature, 2 * SHAPE.kv_heads * SHAPE.head_dim * 2
        programs = len(contexts) * SHAPE.kv_heads * splits
        moved = sum(contexts) * token / (one.bandwidth * programs / (programs + one.fill))
        if one.waves:  # the last wave of programs takes as long as a full one
            slots = 4 * one.processors
            quantized = moved * (-(-programs // slots) * slots / programs)
            moved = (1 - one.waves) * moved + one.waves * quantized
        if sum(contexts) > one.switch_at * len(contexts):
            moved *= 1.0 + one.switch
        waited = max(contexts) * token / SHAPE.kv_heads / splits / one.row_rate
        reduced = 2e-9 * size.decodes * (splits > 1)
        return SHAPE.layers * (self.soft_maximum(moved, waited) + reduced + 2 * one.launch_s)

    def prefills(self, prefills: Sequence[tuple[int, int]]) -> float:
        """Return the attention time (s) of prefills: programs of 32 queries, in waves."""
        if not prefills:
            return 0.0
        one = self.nature
        flops, programs = 0.0, 0
        for tokens, context in prefills:
            flops += 4 * tokens * (context + tokens / 2) * SHAPE.heads * SHAPE.head_dim
            programs += -(-tokens // 32) * SHAPE.kv_heads
        waves = -(-programs // one.processors)
        each = flops / programs / (0.6 * one.flops / one.processors)
        return SHAPE.layers * (waves * each + 2 * one.launch_s)

    def whole(self, contexts: Sequence[int], prefills: Sequence[tuple[int, int]]) -> float:
        """Return the time of a step in isolation."""
        size = padded_size(len(contexts), prefills)
        parts = (self.rest(size), self.decodes(contexts, size), self.prefills(prefills))
        return sum(parts) * (1.0 - self.nature.overlap)

    def host(self, rows: int, *, prefills: bool) -> float:
        """Return the host time of a step in service."""
        one = self.nature
        return one.host_s + rows * one.host_row_s + prefills * one.host_prefill_s


def padded_size(decodes: int, prefills: Sequence[tuple[int, int]]) -> StepSize:
    """Return the padded size of a step."""
    tokens = decodes + sum(t for t, _ in prefills)
    return step_size(decodes, len(prefills), tokens, LIMITS.decodes)


class PlantedBenchmark:
    """Replaces a ``Microbenchmark``; returns the device's true costs as times of points."""

    on_gpu = False

    def __init__(self, device: Device, points: int) -> None:
        self.device = device
        self.limits = LIMITS
        self._points, self._done = points, 0

    def forget(self) -> None:
        """Discard nothing: no graphs are captured."""

    def size(self, point: Probe) -> StepSize:
        return padded_size(len(point.decodes), point.prefills)

    def time(self, point: Probe, repeats: int) -> list[float]:
        self._done += 1
        true, progress = self.true_cost(point), self._done / self._points
        return [self.device.disturbance.apply(true, progress) for _ in range(repeats)]

    def true_cost(self, point: Probe) -> float:
        size = self.size(point)
        if point.part == "rest":
            return self.device.rest(size)
        if point.part == "prefill":
            return self.device.prefills(point.prefills)
        if point.part == "decode":
            return self.device.decodes(point.decodes, size)
        if point.part == "mixed decode":
            return self.device.decodes(point.decodes, size) + self.device.prefills(point.prefills)
        return self.device.whole(point.decodes, point.prefills)


#: Time constant of the decreasing clock in seconds: it has made 63 % of the change after this time.
HEATING_S = 3.0


class PlantedExecutor:
    """Executes the scheduler's decisions at the device's cost; ``passes`` is the log.

    With ``pipelined``, a step takes the maximum of device and host instead of their sum.
    """

    needs_decode_range = True

    def __init__(self, device: Device, *, pipelined: bool = False) -> None:
        self.device = device
        self.pipelined = pipelined
        self.rows: list[BatchRow] = []
        self.passes: list[Any] = []
        self.preempting: list[bool] = []
        self._preempted = False
        self._heat = 0.0

    def watch(self, scheduler: Any) -> Any:
        decide = scheduler.schedule

        def schedule() -> Any:
            batch = decide()
            self.rows, self._preempted = batch.rows(), bool(batch.preempted)
            return batch

        scheduler.schedule = schedule
        return scheduler

    def run(self, load: StepLoad) -> float:
        nature = self.device.nature
        contexts = [row.context for row in self.rows if row.tokens == 1]
        prefills = [(row.tokens, row.context) for row in self.rows if row.tokens > 1]
        on_device = self.device.whole(contexts, prefills) + nature.cold_s
        on_device *= 1.0 + nature.throttle * self._heat
        on_device = self.device.disturbance.apply(on_device, progress=1.0)  # after the campaign
        host = self.device.host(len(contexts), prefills=bool(prefills)) + nature.event_s
        seconds = max(on_device, host) if self.pipelined else on_device + host
        busy = min(load.prefill_tokens / 1024, 1.0)  # matrix products need the most power
        self._heat += (busy - self._heat) * (1.0 - float(np.exp(-seconds / HEATING_S)))
        measured = on_device if self.pipelined else on_device + nature.event_s
        longest = max(contexts, default=0)
        timing = SimpleNamespace(gpu_s=measured)
        self.passes.append(
            SimpleNamespace(load=load, seconds=seconds, timing=timing, longest_context=longest)
        )
        self.preempting.append(self._preempted)
        return seconds

    def forecast_steps(self, load: StepLoad, steps: int) -> list[float]:
        return []

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:
        raise AssertionError("no steps were forecast")

    def idle(self) -> float:
        return 5e-5


def serve(device: Device, scenario: Scenario) -> tuple[PlantedExecutor, GpuRun]:
    """Serve a scenario on the device."""
    engine: Any = scenario.engine
    executor = PlantedExecutor(device, pipelined=engine.async_scheduling)
    scheduler, _ = find_engine_spec(engine).build_with_tables(engine)
    loop = Engine(simpy.Environment(), executor.watch(scheduler), executor, leaping=False)
    record = run_clients(loop, build_clients(scenario.workload, scenario.timeout), scenario.horizon)
    steps = [(p.load._replace(longest=p.longest_context), p.seconds) for p in executor.passes]
    return executor, GpuRun(scenario, steps, executor.preempting, record, Agreement(len(steps)))


class Calibration(NamedTuple):
    """Result of a campaign on a device: profiles and training steps by mode, and measurements."""

    profiles: dict[str, CostProfile]
    training: dict[str, list[TrainingStep]]
    samples: list[Measurement]

    @property
    def profile(self) -> CostProfile:
        """The synchronous profile."""
        return self.profiles[SYNCHRONOUS]


def calibrate(device: Device, *, repeats: int = 1) -> Calibration:
    """Run the campaign, the real runs and the fits, as `simkv gpu calibrate` does."""
    points = plan_campaign(LIMITS)
    benchmark: Any = PlantedBenchmark(device, 2 * len(points))
    clock = count()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(campaign, "perf_counter", lambda: next(clock)),
    ):
        samples = measure(benchmark, points, Path(folder) / "samples.csv", 1e9, repeats=repeats)
    loads = (fit_load(LIMITS), *evaluation_loads(LIMITS))
    passes = {
        mode: [serve(device, w.scenario(LIMITS, pipelined=mode))[0].passes for w in loads]
        for mode in (True, False)
    }
    real = {mode: [real_steps(found) for found in runs] for mode, runs in passes.items()}
    first, *rest = real[False]
    isolated = fit_profile(
        samples, fit_host(passes[False][0]),
        name="planted", model=SHAPE.name, gpu="NVIDIA H100 80GB HBM3", source=[],
    )  # fmt: skip
    profile = fit_synchronous(isolated, first, [s for run in rest for s in run])
    ahead, *rest = real[True]
    overlapped = fit_overlapped(isolated, ahead, [s for run in rest for s in run])
    profiles = {OVERLAPPED: overlapped, SYNCHRONOUS: profile}
    whole = [TrainingStep(p.load, p.seconds) for p in points_by_part(samples)["step"]]
    training = {
        name: [TrainingStep(s.load, s.seconds) for s in steps] + with_host(whole, profiles[name])
        for name, steps in ((OVERLAPPED, ahead), (SYNCHRONOUS, first))
    }
    return Calibration(profiles, training, samples)


#: Duration of the plan in seconds, less than half of a real plan, because all devices are simulated
#: on a CPU.
PLAN_S = 220.0


@lru_cache(maxsize=2)
def planned(seconds: float = PLAN_S) -> tuple[Trial, ...]:
    """Return one trial per case for an H100 with an 8B model; the first device predicts them."""
    profiles = calibrate(Device(sample_nature(0))).profiles
    profile = profiles[SYNCHRONOUS]
    scale: PlanScale = scale_of(profile)
    nominal = nominal_profile(profile)
    trials = plan_trials(profiles, scale, seconds, sized_by=nominal, start_s=0.0)
    return tuple(trial for trial in trials if trial.name.endswith("-seed0"))


class Outcome(NamedTuple):
    """Errors of all cost models over all steps of a plan, and the score of the intervals."""

    effect: str
    median: dict[str, float]
    p95: dict[str, float]
    intervals: IntervalScore | None


def compare_figures(run: GpuRun, profile: CostProfile) -> list[FigureComparison]:
    """Return comparisons of all metrics of a run with the intervals of the profile's simulation."""
    simulated = simulate_with_profile(run.scenario, profile).record
    ends = figure_intervals(run.scenario, profile, simulated)
    real, predicted = figures_of(run.record), figures_of(simulated)
    return [
        FigureComparison(name, real[name], {"profile": predicted[name]}, [], ends.get(name))
        for name in real
    ]


def validate(device: Device, effect: str, trials: Sequence[Trial]) -> Outcome:
    """Calibrate on a device, serve the trials there, and judge all cost models."""
    found = calibrate(device)
    baselines = {
        name: fit_baselines(found.training[name], profile)
        for name, profile in found.profiles.items()
    }
    errors: dict[str, list[float]] = {}
    figures = []
    for trial in trials:
        run = serve(device, trial.scenario)[1]
        profile = found.profiles[trial.profile]
        figures += compare_figures(run, profile)
        steps = steady_steps([run])
        loads, seconds = [s.load for s in steps], np.array([s.seconds for s in steps])
        models = {"profile": profile_model(profile), **baselines[trial.profile]}
        for name, model in models.items():
            off = np.abs(np.array(model.seconds(loads)) / seconds - 1.0)
            errors.setdefault(name, []).extend(off.tolist())
    return Outcome(
        effect,
        {name: float(np.median(found)) for name, found in errors.items()},
        {name: float(np.percentile(found, 95)) for name, found in errors.items()},
        score_intervals(figures),
    )


def validate_seed(seed: int) -> Outcome:
    """Validate device number ``seed``, which has 0.5 % of noise."""
    effect = EFFECTS[seed % len(EFFECTS)]
    disturbance = Disturbance(np.random.default_rng(seed), noise=0.005)
    return validate(Device(sample_nature(seed, effect), disturbance), effect, planned())


def main() -> int:
    devices = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    outcomes = []
    with ProcessPoolExecutor(processes) as pool:
        for seed, found in enumerate(pool.map(validate_seed, range(first, first + devices)), first):
            outcomes.append(found)
            errors = ", ".join(
                f"{name} {100 * found.median[name]:.1f}/{100 * found.p95[name]:.1f}"
                for name in found.median
            )
            score = found.intervals
            print(f"device {seed} ({found.effect}): median/P95 error in %: {errors}; {score}",
                  flush=True)  # fmt: skip
    print(f"| cost model | median | P95 | wins by median, of {devices} | wins by P95 |")
    for name in outcomes[0].median:
        median = 100 * float(np.median([o.median[name] for o in outcomes]))
        p95 = 100 * float(np.median([o.p95[name] for o in outcomes]))
        by_median = sum(o.median["profile"] < o.median[name] for o in outcomes)
        by_p95 = sum(o.p95["profile"] < o.p95[name] for o in outcomes)
        print(f"| {name} | {median:.1f} % | {p95:.1f} % | {by_median} | {by_p95} |")
    for effect in (*EFFECTS, "any"):
        scores = [o.intervals for o in outcomes if o.intervals and effect in (o.effect, "any")]
        if scores:
            held, all_of = sum(s.held for s in scores), sum(s.figures for s in scores)
            width = float(np.median([s.width for s in scores]))
            score = float(np.mean([s.score for s in scores]))
            print(f"intervals, {effect}: {held} of {all_of} hold ({held / all_of:.1%}), median "
                  f"width {width:.1%}, mean score {score:.1%}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
