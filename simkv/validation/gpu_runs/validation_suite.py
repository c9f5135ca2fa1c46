"""Scenarios that compare a profile with a real device. This module does not need torch.

    plan = plan_trials(profiles, scale_of(profile), 540.0, sized_by=nominal_profile(profile))
    [(trial.name, trial.predicted["rows_mean"], trial.predicted_s) for trial in plan]

Each scenario has a given concurrency, because any cost model looks accurate with few concurrent
requests. Lengths are derived from a data sheet (load_sizing.py, nominal_costs.py), independently of
the evaluated profile. A profile therefore cannot select favorable scenarios.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, StepCost
from simkv.costs.step_load import StepLoad
from simkv.scenario.scenario import Scenario
from simkv.validation.gpu_runs.load_sizing import (
    JsonDict,
    LoadSizer,
    PlanScale,
    Trial,
    lengths,
    with_engine,
    with_prediction,
    with_seed,
)

#: Names of the profile for pipelined schedulers and of the profile for all others, as in the files
#: of a calibration campaign.
OVERLAPPED, SYNCHRONOUS = "profile-overlapped", "profile"
#: Case that is served again with the same seed to measure the noise of the machine (A/A).
NOISE_CASE = "rows-quarter"
#: Seconds before the first run (loading weights, CUDA graphs, warm-up), and between two runs.
START_S, PAUSE_S = 90.0, 3.0
#: Number of steps of the shortest case; more steps would not make the errors of steps more precise.
UNIT_STEPS = 1200


@dataclass(frozen=True)
class Case:
    """A kind of load. The duration of its run is proportional to ``weight``.

    ``stresses`` describes what the load tests.
    """

    name: str
    stresses: str
    weight: float


CASES = (
    Case("rows-full", "decodes of the most rows, KV pool mostly full", 2.0),
    Case("rows-half", "decodes of half the rows", 1.5),
    Case("rows-quarter", "decodes of a quarter of the rows", 1.0),
    Case("burst", "all requests at once, saturated", 1.0),
    Case("memory-pressure", "preemption by recompute", 1.5),
    Case("long-prompts", "chunked prompts and mixed steps", 1.0),
    Case("poisson", "arrivals at 85 % of the capacity", 1.0),
    Case("spikes", "spikes of a public trace, shared prefixes", 1.0),
)
#: Cases that are repeated with a synchronous scheduler.
SYNCHRONOUS_CASES = ("rows-half", "memory-pressure")


@dataclass(frozen=True)
class TrialRun:
    """A run of a trial. ``number`` counts the runs of the trial from 1."""

    trial: Trial
    number: int

    @property
    def name(self) -> str:
        """Name of the directory in which the run is stored."""
        return f"{self.trial.name}-{self.number}"


def plan_trials(
    profiles: Mapping[str, CostProfile],
    scale: PlanScale,
    budget_s: float,
    seed: int = 0,
    *,
    sized_by: CostProfile,
    start_s: float = START_S,
) -> list[Trial]:
    """Return all trials in the order in which they run, with the predictions of ``profiles``.

    Each kind of load has two trials with different seeds. All runs together take at most
    ``budget_s`` seconds, by the costs of ``sized_by`` and by the predictions. Raises InputError if
    ``budget_s`` is too short.
    """
    count = len(list(_trials(profiles)))
    units = sum(weight for _, _, weight in _trials(profiles))
    pauses = start_s + PAUSE_S * (count + 1)
    unit = min((budget_s - pauses) / (units + 1.0), UNIT_STEPS * _typical_step(sized_by, scale))
    least = pauses + 3.0 * (units + 1.0)
    for _ in range(6):
        if unit <= 0:
            break
        found = _sized(profiles, scale, unit, seed, sized_by)
        duration = predicted_duration(found, start_s)
        if duration <= budget_s:
            return found
        least = max(least, duration)
        unit *= 0.9 * (budget_s - pauses) / (duration - pauses)
    raise InputError(
        f"--budget: {budget_s:.0f} s is too short for {count + 1} runs; use at least {least:.0f}s"
    )


def predicted_duration(trials: Sequence[Trial], start_s: float = START_S) -> float:
    """Return the predicted duration in seconds of serving all trials, with start-up and pauses."""
    runs = order_trial_runs(trials, 2)
    return start_s + sum(run.trial.predicted_s + PAUSE_S for run in runs)


def order_trial_runs(trials: Sequence[Trial], repeats: int) -> list[TrialRun]:
    """Return one run of every trial, then more runs of the first trial of ``NOISE_CASE``.

    The first trial of ``NOISE_CASE`` has ``repeats`` runs in total.
    """
    again = [trial for trial in trials if trial.name.startswith(NOISE_CASE)][:1]
    return [
        *(TrialRun(trial, 1) for trial in trials),
        *(TrialRun(trial, n) for n in range(2, repeats + 1) for trial in again),
    ]


def _trials(profiles: Mapping[str, CostProfile]) -> Iterator[tuple[str, int, float]]:
    """Yield (load, seed, weight) of each trial. Names with a synchronous scheduler end in -sync."""
    for number in (0, 1):
        yield from ((case.name, number, case.weight) for case in CASES)
        if len(profiles) > 1:
            weights = {case.name: case.weight for case in CASES}
            yield from ((f"{name}-sync", number, weights[name]) for name in SYNCHRONOUS_CASES)


def _sized(
    profiles: Mapping[str, CostProfile],
    scale: PlanScale,
    unit: float,
    seed: int,
    sized_by: CostProfile,
) -> list[Trial]:
    """Return all trials. Each takes its weight times ``unit`` seconds."""
    pipelined = OVERLAPPED in profiles
    vllm = _vllm(scale, pipelined=pipelined)
    weights = {case.name: case.weight for case in CASES}
    sizers = {name: LoadSizer(sized_by, w * unit, scale) for name, w in weights.items()}
    scenarios = {name: _build(name, sizers[name], vllm) for name in weights if name != "spikes"}
    stresses = {case.name: case.stresses for case in CASES}
    found = []
    for name, number, _ in _trials(profiles):
        base, sync = name.removesuffix("-sync"), name.endswith("-sync")
        suffix = f"-seed{seed + number}"
        if base == "spikes":
            scenario = sizers[base].spikes(base, vllm, seed + number)
        else:
            scenario = with_seed(scenarios[base], seed + number)
        if sync:
            scenario = with_engine(scenario, name, async_scheduling=False)
        by = OVERLAPPED if pipelined and not sync else SYNCHRONOUS
        beside = f"{base}{suffix}" if sync else None
        trial = Trial(f"{name}{suffix}", stresses[base], scenario, {}, beside, by)
        found.append(with_prediction(trial, profiles[by]))
    return found


def _build(name: str, sized: LoadSizer, vllm: JsonDict) -> Scenario:
    scale = sized.scale
    most = min(scale.mean_context, scale.context // 2)

    def closed(share: int) -> Scenario:
        rows = max(scale.rows // share, 1)
        context = min(int(0.75 * scale.kv_tokens / rows), most)
        return sized.closed_loop(name, vllm, rows, lengths(context, scale))

    if name == "memory-pressure":
        shape = lengths(most // 3, scale)
        return sized.pressure(name, sized.closed_loop(name, vllm, scale.rows, shape))
    if name == "burst":
        return sized.burst(name, vllm)
    if name == "poisson":
        return sized.poisson(name, vllm)
    if name == "long-prompts":
        shape = lengths(most, scale, output=1 / 16)
        return sized.closed_loop(name, vllm, max(scale.rows // 8, 1), shape)
    return closed({"rows-full": 1, "rows-half": 2, "rows-quarter": 4}[name])


def _typical_step(profile: CostProfile, scale: PlanScale) -> float:
    """Return the duration in seconds of a decode step at half the maximum batch size and KV
    cache.
    """
    rows = max(scale.rows // 2, 1)
    return StepCost(profile)(StepLoad(0, 0, 0, rows, scale.kv_tokens // 2))


def _vllm(scale: PlanScale, *, pipelined: bool) -> JsonDict:
    """Return the engine settings of most trials.

    ``pipelined`` turns on asynchronous scheduling.
    """
    return {
        "name": "vllm",
        "block_size": scale.block_size,
        "num_gpu_blocks": scale.kv_tokens // scale.block_size,
        "max_num_seqs": scale.rows,
        "max_num_batched_tokens": scale.budget,
        "max_model_len": scale.context,
        "enable_prefix_caching": False,
        "async_scheduling": pipelined,
    }
