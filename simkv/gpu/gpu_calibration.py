"""Calibrate a device: measure the cost of steps and the host's overhead, and write a cost
profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from simkv.core.atomic_files import make_folder, write_text
from simkv.core.errors import InputError
from simkv.core.version import __version__
from simkv.costs.cost_profile import CostProfile
from simkv.costs.hardware.model_shape import ModelShape
from simkv.gpu.calibration_runs import OVERLAPPED, run_calibration_loads
from simkv.gpu.campaign import (
    Measurement,
    check_same,
    count_stalled,
    measure,
    measure_drift,
)
from simkv.gpu.campaign_plan import Limits, plan_campaign
from simkv.gpu.device_clocks import log_clocks
from simkv.gpu.execution_record import ExecutionRecord, GpuSetup, pass_rows
from simkv.gpu.machine_info import ceilings, machine_info
from simkv.gpu.microbenchmark import Microbenchmark
from simkv.gpu.profile_fit import (
    HostCosts,
    MedianPass,
    RealStep,
    fit_overlapped,
    fit_profile,
    fit_synchronous,
    points_by_part,
)
from simkv.gpu.torch_executor import Pass


def calibrate(
    setup: GpuSetup,
    limits: Limits,
    folder: Path,
    budget_s: float,
    *,
    repeats: int = 20,
    progress: Callable[[], None] = lambda: None,
) -> Campaign:
    """Measure steps for at most ``budget_s`` seconds, run short workloads, and fit a cost profile.

    An interrupted calibration is resumed. One workload determines the cost of serving, and the
    others determine the error of the profile. The directory ``folder`` then contains the
    measurements (``samples.csv``), the setup and the device's peak rates (``campaign.json``), the
    state of the device (``clocks.csv``), the steps of the workloads (``passes.csv``) and the
    profile (``profile.json``). If steps overlap, ``profile-overlapped.json`` is the profile of
    pipelined engines. Raises InputError if ``folder`` contains a calibration with another setup, or
    if there are too few measurements for a fit.
    """
    begin = perf_counter()
    about = machine_info(setup.device)
    make_folder(folder)
    check_same(
        folder / "campaign.json",
        {
            **about,
            "version": __version__,
            "shape": asdict(setup.shape),
            "limits": asdict(limits),
            "itemsize": setup.itemsize,
            "ceilings": ceilings(setup.device)._asdict(),
        },
    )
    with log_clocks(folder / "clocks.csv", setup.device):
        stand = Microbenchmark(setup.shape, limits, setup.device)
        stand.runner.warm_up(setup.warm_up)
        samples = measure(
            stand,
            plan_campaign(limits),
            folder / "samples.csv",
            budget_s - (perf_counter() - begin),
            repeats=repeats,
            progress=progress,
        )
        del stand
        runs = _served(setup, limits, folder / "passes.csv")
    fitted, *others = (run for run in runs if not run.scenario.name.endswith(OVERLAPPED))
    judged = [step for run in others for step in real_steps(run.passes)]
    try:
        isolated = fit_profile(
            samples,
            fit_host(fitted.passes),
            name=f"{setup.shape.name}-{setup.device}",
            model=setup.shape.name,
            gpu=str(about["device"]),
            source=[
                f"simkv {__version__}, {len(samples)} measurements, {about['date']}",
                f"torch {about['torch']}, {about.get('nvidia_smi') or about['python']}",
                f"the device drifted by {100 * measure_drift(samples):+.1f} % during the "
                f"campaign (not corrected); {count_stalled(samples)} measurements had a stalled "
                "repeat (medians are used)",
            ],
        )
        profile = fit_synchronous(isolated, real_steps(fitted.passes), judged)
        found = Campaign(profile, samples, judged)
        _write(profile, folder / "profile.json")
        if setup.overlap:
            first, *rest = (run for run in runs if run.scenario.name.endswith(OVERLAPPED))
            steps = [step for run in rest for step in real_steps(run.passes)]
            overlapped = fit_overlapped(isolated, real_steps(first.passes), steps)
            _write(overlapped, folder / "profile-overlapped.json")
            found = Campaign(overlapped, samples, steps)
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from error
    return found


class Campaign(NamedTuple):
    """Result of a calibration: its main profile, all measurements, and the steps used for
    evaluation.
    """

    profile: CostProfile
    samples: list[Measurement]
    judged: list[RealStep]


def _write(profile: CostProfile, path: Path) -> None:
    write_text(path, profile.model_dump_json(indent=1, exclude_none=True) + "\n")


def _served(setup: GpuSetup, limits: Limits, path: Path) -> list[ExecutionRecord]:
    """Run the workloads, write their passes to ``path``, and return their records."""
    runs, rows = [], []
    for name, run in run_calibration_loads(setup, limits):
        runs.append(run)
        rows += pass_rows(name, run)
        write_text(path, pd.DataFrame(rows).to_csv(index=False))
    return runs


def real_steps(passes: Sequence[Pass]) -> list[RealStep]:
    """Return the steps of a run, without idle passes of the engine's loop."""
    return [
        RealStep(p.load._replace(longest=p.longest_context), p.seconds, p.timing.gpu_s)
        for p in passes
        if p.timing
    ]


def fit_host(passes: Sequence[Pass]) -> HostCosts:
    """Fit the host time of steps: the total time minus the device time.

    The model has a constant, a cost per decoding sequence, and a cost per step with prefills.
    """
    steps = [(p.load, p.seconds - p.timing.gpu_s) for p in passes if p.timing]
    rest = np.array([seconds for _, seconds in steps])
    rows = np.array([[1.0, load.decode_seqs, bool(load.prefill_seqs)] for load, _ in steps])
    (step_s, sequence_s, prefill_s), _ = nnls(rows / rest[:, None], np.ones(len(rest)))
    idle = [p.seconds for p in passes if not p.timing]
    idle_s = median(idle) if idle else max(step_s, 1e-6)
    return HostCosts(float(step_s), float(sequence_s), idle_s, float(prefill_s))


def achieved_rates(
    samples: Sequence[Measurement], shape: ModelShape, itemsize: int
) -> dict[str, Any]:
    """Return the rates of the attention kernels in the largest measured steps, in GB/s and
    TFLOP/s.
    """
    parts = points_by_part(samples)
    found: dict[str, Any] = {}
    if decodes := parts.get("decode"):
        most = max(decodes, key=lambda p: p.load.decode_context)
        moved = most.load.decode_context * shape.kv_bytes_per_token(itemsize)
        found["decode attention GB/s"] = round(moved / most.seconds / 1e9, 1)
    if prefills := parts.get("prefill"):
        widest = max(prefills, key=_pairs)
        flops = 4 * _pairs(widest) * shape.layers * shape.heads * shape.head_dim
        found["prefill attention TFLOP/s"] = round(flops / widest.seconds / 1e12, 2)
    return found


def _pairs(point: MedianPass) -> int:
    return point.load.prefill_pairs
