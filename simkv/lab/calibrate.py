"""From a device to a cost profile: measure, see what the host adds, fit, write."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import nnls

from simkv.core.errors import InputError
from simkv.core.files import make_folder, write_text
from simkv.core.version import __version__
from simkv.costs.hardware.shapes import ModelShape
from simkv.costs.profile import Profile, StepCost
from simkv.lab.campaign import Measurement, check_same, measure
from simkv.lab.clocks import clocks_logged
from simkv.lab.executor import Pass
from simkv.lab.fit import Host, MedianPass, RealStep, by_part, errors, fit_profile
from simkv.lab.machine import machine
from simkv.lab.overlap import overlapped
from simkv.lab.probes import Limits, plan
from simkv.lab.served import Served, Setup, pass_rows
from simkv.lab.service import OVERLAPPED, real_runs
from simkv.lab.stand import Stand
from simkv.lab.steadied import drift, stalled


def calibrate(
    setup: Setup,
    limits: Limits,
    folder: Path,
    budget_s: float,
    *,
    repeats: int = 20,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Profile, list[Measurement]]:
    """Measure within ``budget_s`` seconds, the start of the model included, and fit.

    Goes on with an earlier campaign. After the budget come only three short runs: one shows what
    serving adds, the others how wrong the profile is. Leaves in ``folder`` the raw measurements
    (``samples.csv``), what they were made on (``campaign.json``), what the device said of itself
    all the while (``clocks.csv``), every pass of the real runs (``passes.csv``), and the profile
    (``profile.json``); where steps overlap, that of pipelined engines, too
    (``profile-overlapped.json``). Raises InputError if the folder holds a
    campaign of something else, or too little was measured for a fit.
    """
    begin = perf_counter()
    about = machine(setup.device)
    make_folder(folder)
    check_same(
        folder / "campaign.json",
        {
            **about,
            "version": __version__,
            "shape": asdict(setup.shape),
            "limits": asdict(limits),
            "layout": setup.layout,
        },
    )
    with clocks_logged(folder / "clocks.csv", setup.device):
        stand = Stand(setup.shape, limits, setup.device, setup.layout)
        stand.runner.warm_up(setup.warm_up)
        samples = measure(
            stand,
            plan(limits),
            folder / "samples.csv",
            budget_s - (perf_counter() - begin),
            repeats=repeats,
            progress=progress,
        )
        del stand
        gc.collect()
        if torch.device(setup.device).type == "cuda":
            torch.cuda.empty_cache()
        fitted, *others = _served(setup, limits, folder / "passes.csv")
        ahead = [run for run in others if run.scenario.name.endswith(OVERLAPPED)]
        others = [run for run in others if run not in ahead]
    real = real_steps(fitted.passes)
    judged = [step for run in others for step in real_steps(run.passes)]
    host = host_of(fitted.passes)
    gpu = str(about["device"])
    try:
        profile = fit_profile(
            samples,
            host,
            real,
            judged,
            name=f"{setup.shape.name}-{setup.device}",
            model=setup.shape.name,
            gpu=gpu,
            source=[
                f"simkv {__version__}, {len(samples)} measurements, {about['date']}",
                f"torch {about['torch']}, {about.get('nvidia_smi') or about['python']}",
                f"the device drifted by {100 * drift(samples):+.1f} % during the campaign, which "
                f"is reckoned out; {stalled(samples)} measurements stalled once, not counted",
            ],
        )
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from error
    _write(profile, folder / "profile.json")
    if ahead:
        steps = [(s.load, s.seconds) for run in ahead for s in real_steps(run.passes)]
        found = overlapped(profile)
        fit = found.fit.model_copy(update={"held_out": errors(StepCost(found), steps)})
        found = found.model_copy(update={"fit": fit})
        _write(found, folder / "profile-overlapped.json")
    return profile, samples


def _write(profile: Profile, path: Path) -> None:
    write_text(path, profile.model_dump_json(indent=1, exclude_none=True) + "\n")


def _served(setup: Setup, limits: Limits, path: Path) -> list[Served]:
    """The real runs, all their passes written to ``path`` as each of them ends."""
    runs, rows = [], []
    for name, run in real_runs(setup, limits):
        runs.append(run)
        rows += pass_rows(name, run)
        write_text(path, pd.DataFrame(rows).to_csv(index=False))
    return runs


def real_steps(passes: Sequence[Pass]) -> list[RealStep]:
    """The steps among the passes of a run, without the idle ones."""
    return [
        RealStep(p.load._replace(longest=p.longest_context), p.seconds, p.timing.gpu_s)
        for p in passes
        if p.timing
    ]


def host_of(passes: Sequence[Pass]) -> Host:
    """Steps less their device time: a constant, a slope over the sequences that decode, and more
    for steps with prefills."""
    steps = [(p.load, p.seconds - p.timing.gpu_s) for p in passes if p.timing]
    rest = np.array([seconds for _, seconds in steps])
    rows = np.array([[1.0, load.decode_seqs, bool(load.prefill_seqs)] for load, _ in steps])
    (step_s, sequence_s, prefill_s), _ = nnls(rows / rest[:, None], np.ones(len(rest)))
    idle = [p.seconds for p in passes if not p.timing]
    idle_s = median(idle) if idle else max(step_s, 1e-6)
    return Host(float(step_s), float(sequence_s), idle_s, float(prefill_s))


def achieved(samples: Sequence[Measurement], shape: ModelShape, itemsize: int) -> dict[str, Any]:
    """What the attention kernels reach at their largest points: GB/s and TFLOP/s."""
    parts = by_part(samples)
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
