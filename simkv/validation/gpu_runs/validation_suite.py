"""Scenarios that compare a profile with a real device. Needs no torch.

    cases = plan_trials(profile, FULL_SCALE, seconds=14.0, sized_by=nominal_profile(profile))
    [(case.name, case.scenario.workload.size, case.predicted_s) for case in cases]

Rates, run lengths and pool sizes follow from a data sheet (load_sizing.py, nominal_costs.py), not
from the evaluated profile and before any run. The plan and the profile's predictions can therefore
be recorded first, and no profile can select favorable cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from simkv.costs.cost_profile import CostProfile
from simkv.scenario.packaged_scenarios import list_packaged_scenarios
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.validation.gpu_runs.load_sizing import (
    JsonDict,
    LoadSizer,
    Trial,
    WorkloadScale,
    listed_request,
    scenario_of,
    with_engine,
    with_prediction,
)
from simkv.workload.workload_section import build_clients

#: An 8B model on a large GPU, with a pool cut to 96,000 tokens.
FULL_SCALE = WorkloadScale(300, 250, 2000, 64, 8000, 2048, 256, 6000)
#: The tiny model on a CPU.
SMALL_SCALE = WorkloadScale(30, 20, 120, 8, 480, 128, 16, 400, divisor=10)

#: Cases repeated first; their noise represents similar cases.
REPEATED_FIRST = ("decode-heavy", "memory-pressure")


@dataclass(frozen=True)
class TrialRun:
    """A case to be served for the ``number``-th time, starting at 1."""

    trial: Trial
    number: int

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{self.trial.name}-{self.number}"


def plan_trials(
    profile: CostProfile,
    scale: WorkloadScale,
    seconds: float,
    seed: int = 0,
    *,
    sized_by: CostProfile,
) -> list[Trial]:
    """Return all cases, the most informative first, with the predictions of ``profile``.

    Each takes about ``seconds`` by the costs of ``sized_by``. Raises InputError if no pool is small
    enough for the target number of preemptions.
    """
    vllm = _vllm(scale, pipelined=bool(profile.floor))
    sized = LoadSizer(sized_by, seconds, seed)
    decodes = sized.drawn(
        "decode-heavy", vllm, _lognormal(scale.prompt), _lognormal(scale.output), scale
    )
    prefills = sized.drawn(
        "prefill-heavy", vllm, _lognormal(scale.long_prompt), scale.short_output, scale
    )
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": scale.longest}
    pressed = sized.make_pressure_scenario(
        "memory-pressure",
        vllm,
        _uniform(scale.prompt // 2, 3 * scale.prompt // 2),
        _uniform(scale.output // 2, 2 * scale.output),
    )
    spikes = sized.make_spike_scenario(
        "bursty-trace", {**vllm, "enable_prefix_caching": True}, scale
    )
    found = [
        Trial("decode-heavy", "batched decodes", decodes, {}),
        Trial("memory-pressure", "preemption by recompute", pressed, {}),
        Trial("prefill-heavy", "chunks and mixed steps", prefills, {}),
        Trial(
            "prefill-whole",
            "prompts in one piece",
            with_engine(prefills, "prefill-whole", **whole),
            {},
            beside="prefill-heavy",
        ),
        *_incident(sized, scale, "mistralrs-six", "before"),
        *_incident(sized, scale, "mistralrs-forty", "before-fitted"),
        Trial("bursty-trace", "spikes, shared prefixes", spikes, {}),
    ]
    return [with_prediction(case, profile) for case in found]


def order_trial_runs(cases: Sequence[Trial], repeats: int) -> list[TrialRun]:
    """Return every case once, then the repeats, ``REPEATED_FIRST`` first."""
    again = sorted(cases, key=lambda case: case.name not in REPEATED_FIRST)
    found = [TrialRun(case, 1) for case in cases]
    return found + [TrialRun(case, n) for n in range(2, repeats + 1) for case in again]


def _incident(sized: LoadSizer, scale: WorkloadScale, name: str, variant: str) -> list[Trial]:
    """Return a packaged mistral.rs incident before and after its fix, at the scale's block size."""
    original = load(list_packaged_scenarios()[name])[variant]
    requests = build_clients(original.workload, original.timeout).requests
    engine: Any = original.engine
    blocks = (engine.num_gpu_blocks - 1) * engine.block_size // scale.block_size + 1
    knobs = {
        "name": "mistralrs",
        "block_size": scale.block_size,
        "num_gpu_blocks": min(blocks, scale.num_blocks),
        "max_num_seqs": min(engine.max_num_seqs, scale.max_num_seqs),
    }

    def of(variant: str) -> Callable[[int], Scenario]:
        rows = [listed_request(r, scale.divisor, timed=True) for r in requests]
        return lambda count: scenario_of(
            f"{name}-{variant}",
            {**knobs, "variant": variant},
            {"requests": rows[:count]},
            timeout=original.timeout,
        )

    # The run before the fix takes longest; both must serve the same requests.
    count = sized.cut(of("bucketed"), len(requests))
    before, after = of("bucketed")(count), of("pr2034")(count)
    return [
        Trial(before.name, "recompute at every length that differs", before, {}),
        Trial(after.name, "the same after the fix", after, {}, beside=before.name),
    ]


def _vllm(scale: WorkloadScale, *, pipelined: bool) -> JsonDict:
    """Return the engine of most cases; it overlaps steps if the profile's engine does."""
    return {
        "name": "vllm",
        "block_size": scale.block_size,
        "num_gpu_blocks": scale.num_blocks,
        "max_num_seqs": scale.max_num_seqs,
        "max_num_batched_tokens": scale.budget,
        "max_model_len": scale.longest,
        "enable_prefix_caching": False,
        "async_scheduling": pipelined,
    }


def _lognormal(mean: int) -> JsonDict:
    return {"distribution": "lognormal", "mean": mean, "sigma": 0.7}


def _uniform(low: int, high: int) -> JsonDict:
    return {"distribution": "uniform", "low": low, "high": high}
