"""Devices with known costs in the place of a GPU: what campaign and fit make of them.

    python -m tests.gpu.synthetic_devices 50          devices; a line for each, then the coverage

What a step costs there is not written in the terms of the fit: matrix products go by waves of tiles
and by bytes, whichever is longer, with a soft knee; the bandwidth that attention reaches hangs on
how many programs run; the longest row is waited for; whole steps overlap a little; serving adds the
host and cold caches. All numbers are drawn anew for each device around those of an H100 with an 8B
model. On top may come noise, drift and stalls. Neither campaign nor fit imports anything from here.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from simkv.gpu.calibration_runs import CalibrationLoad, evaluation_loads, fit_load
from simkv.gpu.campaign import Measurement, measure
from simkv.gpu.campaign_plan import Limits, Probe, plan_campaign
from simkv.gpu.drift_correction import count_stalled, measure_drift
from simkv.gpu.gpu_calibration import fit_host, real_steps
from simkv.gpu.graph_buckets import step_size
from simkv.gpu.profile_fit import fit_profile
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.validation.gpu_runs.comparison_levels import FIGURES, figures_of, validate_run
from simkv.validation.gpu_runs.timed_replay import Agreement, GpuRun
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


class Nature(NamedTuple):
    """What a device is like: rates, latencies (s) and shares."""

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


def drawn(seed: int) -> Nature:
    """A device like an H100, or rather less or more."""
    random = np.random.default_rng(seed)

    def about(value: float, share: float = 0.3) -> float:
        return value * float(np.exp(random.uniform(-share, share)))

    return Nature(
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
    )


@dataclass
class Weather:
    """What comes on top: noise, the share by which it is slower in the end, stalls."""

    random: np.random.Generator
    noise: float = 0.0
    drift: float = 0.0
    stalls: float = 0.0
    stalled: int = 0

    def on(self, seconds: float, progress: float = 0.0) -> float:
        """What is measured of a step that takes so long, at that share of the campaign."""
        seconds *= 1.0 + self.drift * progress
        if self.noise:
            seconds *= float(np.exp(self.random.normal(0.0, self.noise)))
        if self.stalls and self.random.random() < self.stalls:
            self.stalled += 1
            seconds += float(self.random.uniform(0.03, 0.2))
        return seconds


@dataclass
class Device:
    """A device: seconds of any part of any step."""

    nature: Nature
    weather: Weather = field(default_factory=lambda: Weather(np.random.default_rng(0)))

    def soft(self, *seconds: float) -> float:
        """The longest of these, or a little more where they are alike."""
        knee = self.nature.knee
        return float(sum(s**knee for s in seconds) ** (1.0 / knee))

    def rest(self, size: StepSize) -> float:
        """All but attention."""
        layers = sum(self._product(size.tokens, n, k) for n, k in PRODUCTS) * SHAPE.layers
        head = self._product(size.decodes + size.prefills, SHAPE.vocab, SHAPE.hidden)
        moved = 40 * size.tokens * SHAPE.hidden * 2 / self.nature.bandwidth
        return layers + head + SHAPE.layers * (9 * self.nature.launch_s + moved / 8)

    def _product(self, m: int, n: int, k: int) -> float:
        one = self.nature
        tiles = -(-m // 128) * -(-n // 128)
        waves = -(-tiles // one.processors)
        tile = 2 * 128 * 128 * k / (one.flops / one.processors)
        return self.soft(waves * tile, 2 * n * k / one.bandwidth) + one.launch_s

    def decodes(self, contexts: Sequence[int], size: StepSize) -> float:
        """Attention of rows that decode, split as the runner splits them."""
        if not contexts:
            return 0.0
        rows = min(size.decodes, 32) if size.prefills else size.decodes
        splits = min(1 << max(-(-528 // (rows * SHAPE.kv_heads)) - 1, 0).bit_length(), 64)
        one, token = self.nature, 2 * SHAPE.kv_heads * SHAPE.head_dim * 2
        programs = len(contexts) * SHAPE.kv_heads * splits
        moved = sum(contexts) * token / (one.bandwidth * programs / (programs + one.fill))
        waited = max(contexts) * token / SHAPE.kv_heads / splits / one.row_rate
        reduced = 2e-9 * size.decodes * (splits > 1)
        return SHAPE.layers * (self.soft(moved, waited) + reduced + 2 * one.launch_s)

    def prefills(self, prefills: Sequence[tuple[int, int]]) -> float:
        """Attention of prefills: programs of 32 queries, in waves."""
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
        """A step, replayed by itself."""
        size = sized(len(contexts), prefills)
        parts = (self.rest(size), self.decodes(contexts, size), self.prefills(prefills))
        return sum(parts) * (1.0 - self.nature.overlap)

    def host(self, rows: int, *, prefills: bool) -> float:
        """What the host adds to a step in service."""
        one = self.nature
        return one.host_s + rows * one.host_row_s + prefills * one.host_prefill_s


def sized(decodes: int, prefills: Sequence[tuple[int, int]]) -> StepSize:
    tokens = decodes + sum(t for t, _ in prefills)
    return step_size(decodes, len(prefills), tokens, LIMITS.decodes)


class PlantedStand:
    """Stands where a campaign expects a model: times points by the device's truth."""

    on_gpu = False

    def __init__(self, device: Device, points: int) -> None:
        self.device = device
        self.limits = LIMITS
        self._points, self._done = points, 0

    def forget(self) -> None:
        """Nothing is kept."""

    def size(self, point: Probe) -> StepSize:
        return sized(len(point.decodes), point.prefills)

    def time(self, point: Probe, repeats: int) -> list[float]:
        self._done += 1
        true, progress = self.truth(point), self._done / self._points
        return [self.device.weather.on(true, progress) for _ in range(repeats)]

    def truth(self, point: Probe) -> float:
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


class PlantedExecutor:
    """Runs what its scheduler decides at the device's cost; ``passes`` is the log."""

    needs_decode_range = True

    def __init__(self, device: Device) -> None:
        self.device = device
        self.rows: list[BatchRow] = []
        self.passes: list[Any] = []
        self.preempting: list[bool] = []
        self._preempted = False

    def watch(self, scheduler: Any) -> Any:
        decide = scheduler.schedule

        def schedule() -> Any:
            batch = decide()
            self.rows, self._preempted = batch.rows(), bool(batch.preempted)
            return batch

        scheduler.schedule = schedule
        return scheduler

    def run(self, load: StepLoad) -> float:
        contexts = [row.context for row in self.rows if row.tokens == 1]
        prefills = [(row.tokens, row.context) for row in self.rows if row.tokens > 1]
        on_device = self.device.whole(contexts, prefills) + self.device.nature.cold_s
        on_device = self.device.weather.on(on_device, progress=1.0)  # after the campaign
        seconds = on_device + self.device.host(len(contexts), prefills=bool(prefills))
        longest = max(contexts, default=0)
        timing = SimpleNamespace(gpu_s=on_device)
        self.passes.append(
            SimpleNamespace(load=load, seconds=seconds, timing=timing, longest_context=longest)
        )
        self.preempting.append(self._preempted)
        return seconds

    def forecast_steps(self, load: StepLoad, steps: int) -> list[float]:
        return []

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:
        raise AssertionError("nothing was foreseen")

    def idle(self) -> float:
        return 5e-5


def served(device: Device, scenario: Scenario) -> tuple[PlantedExecutor, GpuRun]:
    """A scenario served on the device."""
    executor = PlantedExecutor(device)
    scheduler, _ = find_engine_spec(scenario.engine).build_with_tables(scenario.engine)
    engine = Engine(simpy.Environment(), executor.watch(scheduler), executor, leaping=False)
    record = run_clients(
        engine, build_clients(scenario.workload, scenario.timeout), scenario.horizon
    )
    steps = [(p.load, p.seconds) for p in executor.passes]
    recorded = GpuRun(scenario, steps, executor.preempting, record, Agreement(len(steps)))
    return executor, recorded


class Found(NamedTuple):
    """What campaign and fit made of a device."""

    profile: CostProfile
    drift: float
    stalled: int
    samples: list[Measurement]


def calibrated(device: Device, *, repeats: int = 1) -> Found:
    """The campaign, the real runs and the fit, as `simkv gpu calibrate` does them."""
    points = plan_campaign(LIMITS)
    stand: Any = PlantedStand(device, 2 * len(points))
    clock = count()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(campaign, "perf_counter", lambda: next(clock)),
    ):
        samples = measure(stand, points, Path(folder) / "samples.csv", 1e9, repeats=repeats)
    fitted, *others = (
        served(device, load.scenario(LIMITS))[0].passes
        for load in (fit_load(LIMITS), *evaluation_loads(LIMITS))
    )
    judged = [step for passes in others for step in real_steps(passes)]
    profile = fit_profile(
        samples, fit_host(fitted), real_steps(fitted), judged,
        name="planted", model=SHAPE.name, gpu="none", source=[],
    )  # fmt: skip
    return Found(profile, measure_drift(samples), count_stalled(samples), samples)


#: What nothing was fitted to: many requests in flight, prompts of middle length.
FREE = CalibrationLoad("free", 96, 700, 1024)


def judged_freely(device: Device, profile: CostProfile) -> dict[str, bool]:
    """Whether each figure of a run lies in the interval that the profile states."""
    run = served(device, FREE.scenario(LIMITS))[1]
    found = validate_run(run, profile)
    return {f.name: bool(f.held) for f in found.figures}


def coverage(held: int, devices: int, seed: int = 0) -> tuple[float, float]:
    """Between what shares 95 of 100 resampled sets of as many devices lie."""
    shares = np.random.default_rng(seed).binomial(devices, held / devices, 2000) / devices
    low, high = np.percentile(shares, (2.5, 97.5))
    return float(low), float(high)


def main() -> int:
    devices = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    held: dict[str, int] = dict.fromkeys(FIGURES, 0)
    worst = []
    for seed in range(devices):
        device = Device(drawn(seed))
        found = calibrated(device)
        error = found.profile.fit.held_out["all"]
        inside = judged_freely(device, found.profile)
        for name, well in inside.items():
            held[name] += well
        worst.append((error.median, error.p95))
        print(
            f"device {seed}: held-out steps {100 * error.median:.2f} % at the median, "
            f"{100 * error.p95:.2f} % at P95; {sum(inside.values())} of {len(inside)} figures in "
            "their interval",
            flush=True,
        )
    medians, highs = zip(*worst, strict=True)
    print(f"median error over devices: {100 * np.median(medians):.2f} %, worst "
          f"{100 * max(medians):.2f} %; P95: {100 * np.median(highs):.2f} %, "
          f"worst {100 * max(highs):.2f} %")  # fmt: skip
    good = sum(median <= 0.01 and high <= 0.03 for median, high in worst)
    print(f"within 1 % at the median and 3 % at P95: {good} of {devices}")
    for name, n in held.items():
        low, high = coverage(n, devices)
        print(f"{name}: interval holds on {n} of {devices} (resampled: {low:.0%} to {high:.0%})")
    return 0


if __name__ == "__main__":
    assert figures_of
    sys.exit(main())
