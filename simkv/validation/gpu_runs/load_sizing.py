"""Choose the lengths and rates of validation runs by simulation. This module does not need
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.request import Request
from simkv.costs.cost_profile import CostProfile, Feature
from simkv.costs.cost_terms import compute_feature
from simkv.costs.simulated_executor import SimulatedExecutor, advance_load
from simkv.costs.step_load import StepLoad
from simkv.metrics.run_metrics import summarize
from simkv.scenario.scenario import Scenario
from simkv.sim.simulation import simulate_with_profile
from simkv.workload.workload_section import Workload, build_clients

JsonDict = dict[str, Any]
#: Minimum and target number of preemptions of a run under memory pressure.
MIN_PREEMPTIONS, TARGET_PREEMPTIONS = 50, 80
#: Arrival rate as a fraction of the capacity.
ARRIVAL_LOAD = 0.85
#: Horizon of a run as a multiple of its predicted duration.
HORIZON_FACTOR = 3.0
#: Mean prompt length (tokens) below which a closed loop is not shortened further.
SHORTEST_PROMPT = 24


@dataclass(frozen=True)
class PlanScale:
    """Limits on the sizes of all validation runs.

    ``rows`` is the largest number of decodes in a step. In tokens, ``kv_tokens`` is the size of the
    KV pool, ``context`` the length of the longest request, ``budget`` the size of the largest step,
    and ``mean_context`` the largest mean length in a closed loop. Lengths of recorded workloads are
    divided by ``divisor``.
    """

    rows: int = 256
    kv_tokens: int = 400_000
    context: int = 6000
    budget: int = 2048
    mean_context: int = 1200
    block_size: int = 16
    divisor: int = 1


def scale_of(profile: CostProfile, kv_tokens: int | None = None) -> PlanScale:
    """Return the sizes that the calibration of ``profile`` covered.

    ``kv_tokens`` limits the size of the KV pool. Raises InputError if the profile has no calibrated
    range, or if the pool is larger than the range.
    """
    wanted: tuple[Feature, ...] = ("decode_seqs", "decode_context", "decode_tail", "prefill_tokens")
    if missing := [name for name in wanted if name not in profile.range]:
        raise InputError(
            f"{profile.name}: range: missing {', '.join(missing)}; a validation plan requires a "
            "profile made by `simkv gpu calibrate`"
        )
    rows, covered, tail, tokens = (int(profile.range[name][1]) for name in wanted)
    if kv_tokens and kv_tokens > covered:
        raise InputError(
            f"--kv-tokens {kv_tokens}: the profile was calibrated for at most {covered} tokens of "
            f"KV; use at most this number"
        )
    large = tail > 2000
    return PlanScale(
        rows=rows,
        kv_tokens=kv_tokens or covered,
        context=tail,
        budget=max(tokens // 4, 2 * rows),
        divisor=1 if large else 10,
    )


@dataclass(frozen=True)
class Trial:
    """A scenario to be served on the GPU.

    ``beside`` is the name of the trial to compare with. ``profile`` is the name of the profile that
    predicts the trial. ``predicted`` contains the predicted metrics, named as in ``summary.json``,
    and the predicted maxima of decodes per step and of KV tokens.
    """

    name: str
    stresses: str
    scenario: Scenario
    predicted: dict[str, Any]
    beside: str | None = None
    profile: str = "profile"

    @property
    def predicted_s(self) -> float:
        """Predicted duration in seconds."""
        return float(self.predicted["makespan_s"])


@dataclass(frozen=True)
class LoadSizer:
    """Sizer of validation runs. It chooses arrival rates and numbers of requests.

    The choice is made by simulation with costs from a data sheet.
    """

    profile: CostProfile
    seconds: float
    scale: PlanScale

    def closed_loop(self, name: str, engine: JsonDict, rows: int, shape: JsonDict) -> Scenario:
        """Return a scenario with ``rows`` clients. Each client sends a request when its last one
        ends.

        ``shape`` contains the lengths, which are reduced if the run would take too long.
        """
        while True:

            def of(count: int, shape: JsonDict = shape) -> Scenario:
                arrivals = {"num_prompts": count, "request_rate": float("inf"), **shape}
                return scenario_of(name, engine, {"max_concurrency": rows, "arrivals": arrivals})

            once, twice = (self._seconds(of(n * rows)) for n in (1, 2))
            mean = shape["prompt_tokens"]["mean"]
            if once <= self.seconds or mean <= SHORTEST_PROMPT:
                each = max((twice - once) / rows, 1e-9)
                return of(rows + max(int((self.seconds - once) / each), 0))
            shape = shortened(shape)

    def burst(self, name: str, engine: JsonDict) -> Scenario:
        """Return a scenario in which all requests arrive at once.

        The number of requests is at least twice the maximum batch size.
        """
        context = min(512, self.scale.mean_context // 4, self.scale.kv_tokens // self.scale.rows)

        def of(count: int) -> Scenario:
            shape = lengths(context, self.scale)
            arrivals = {"num_prompts": count, "request_rate": float("inf"), **shape}
            return scenario_of(name, engine, {"arrivals": arrivals})

        least = 2 * self.scale.rows
        return of(max(int(least * self.seconds / self._seconds(of(least))), least))

    def poisson(self, name: str, engine: JsonDict) -> Scenario:
        """Return a scenario with Poisson arrivals at a fraction of the engine's capacity."""
        shape = lengths(min(500, self.scale.mean_context // 4), self.scale)
        sample = 2 * self.scale.rows

        def of(count: int, rate: float) -> Scenario:
            arrivals = {"num_prompts": count, "request_rate": rate, **shape}
            return scenario_of(name, engine, {"arrivals": arrivals})

        rate = float(f"{ARRIVAL_LOAD * sample / self._seconds(of(sample, float('inf'))):.4g}")
        return of(
            self.fitting_count(lambda n: of(n, rate), max(int(rate * self.seconds), 12)), rate
        )

    def pressure(self, name: str, calm: Scenario) -> Scenario:
        """Return the scenario ``calm`` with a smaller KV cache, which causes preemptions.

        Raises InputError if no cache size causes enough preemptions within the available time.
        """
        blocks = int(0.9 * self._figures(calm)["kv_tokens_peak"] // self.scale.block_size)
        least = self.scale.context // self.scale.block_size + 2
        enough = None
        while blocks >= least:
            scenario = with_engine(calm, name, num_gpu_blocks=blocks)
            preemptions = self._figures(scenario)["preemptions"]
            if preemptions >= TARGET_PREEMPTIONS:
                return scenario
            if preemptions >= MIN_PREEMPTIONS and enough is None:
                enough = scenario
            blocks = int(0.9 * blocks)
        if enough is None:
            raise InputError(
                f"{name}: no size of the KV cache causes {MIN_PREEMPTIONS} preemptions in "
                f"{self.seconds:.1f} s; use a longer --budget"
            )
        return enough

    def spikes(self, name: str, engine: JsonDict, window: int) -> Scenario:
        """Return a scenario with a part of a packaged trace of load spikes.

        The rate of the trace is scaled to the capacity of the engine. ``window`` selects the part.
        """
        rows = trace_requests(self.scale.divisor, self.scale.context)
        engine = {**engine, "enable_prefix_caching": True}

        def of(part: Sequence[JsonDict]) -> Scenario:
            return scenario_of(name, engine, {"requests": [dict(row) for row in part]})

        sample = rows[: min(len(rows), 2 * self.scale.rows)]
        rate = (
            ARRIVAL_LOAD
            * len(sample)
            / self._seconds(of([{**row, "arrival": 0.0} for row in sample]))
        )
        count = max(min(int(rate * self.seconds), len(rows) // 2), 12)
        first = window * count % (len(rows) - count + 1)
        part = rows[first : first + count]
        begin, end = part[0]["arrival"], part[-1]["arrival"]
        pace = count / (end - begin) / rate
        part = [{**row, "arrival": round((row["arrival"] - begin) * pace, 6)} for row in part]
        return of(part[: self.fitting_count(lambda n: of(part[:n]), count)])

    def fitting_count(self, of: Callable[[int], Scenario], count: int) -> int:
        """Return the number of requests, at most ``count``, that can be served in the available
        time.

        ``of`` returns the scenario for a number of requests.
        """
        while count > 6 and self._seconds(of(count)) > 1.3 * self.seconds:
            count = max(3 * count // 4, 6)
        return count

    def _seconds(self, scenario: Scenario) -> float:
        return float(self._figures(scenario)["makespan_s"])

    def _figures(self, scenario: Scenario) -> dict[str, Any]:
        return predict_figures(scenario, self.profile)


class ObservedExecutor(SimulatedExecutor):
    """Executor that also records the mean number of decodes, and the largest value of each
    feature.
    """

    def __init__(self, profile: CostProfile) -> None:
        super().__init__(profile)
        self.needs_decode_range = True
        self.peaks: dict[str, float] = {}
        self.row_seconds = self.seconds = 0.0
        self._features = ["decode_seqs", "decode_context", *profile.range]

    def run(self, load: StepLoad) -> float:
        taken = super().run(load)
        self._observe(load, taken)
        return taken

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:
        super().ran(load, seconds)
        self._observe(advance_load(load, len(seconds)), sum(seconds))

    def _observe(self, load: StepLoad, taken: float) -> None:
        self.seconds += taken
        self.row_seconds += taken * load.decode_seqs
        for name in self._features:
            self.peaks[name] = max(compute_feature(load, name), self.peaks.get(name, 0.0))


def predict_figures(scenario: Scenario, profile: CostProfile) -> dict[str, Any]:
    """Return the metrics of ``summary.json`` as predicted by ``profile``, and properties of the
    load.

    ``rows_mean`` is the mean number of decodes over time. ``rows_peak`` and ``kv_tokens_peak`` are
    the largest numbers of decodes and of KV tokens. ``outside`` lists the features that exceed the
    range of the profile.
    """
    executor = ObservedExecutor(profile)
    record = simulate_with_profile(scenario, profile, changed=lambda _: executor).record
    engine: Any = scenario.engine
    free = min(record.steps.free_blocks, default=record.num_blocks)
    return {
        **summarize(record),
        "requests": scenario.workload.size,
        "rows_mean": round(executor.row_seconds / max(executor.seconds, 1e-9), 1),
        "rows_peak": int(executor.peaks.get("decode_seqs", 0)),
        "kv_tokens_peak": (record.num_blocks - free) * engine.block_size,
        "outside": [
            name for name, (_, high) in profile.range.items() if executor.peaks.get(name, 0) > high
        ],
    }


def with_prediction(case: Trial, profile: CostProfile) -> Trial:
    """Return the trial with the metrics that the profile predicts.

    The predicted duration determines the scenario's time limit (``horizon``).
    """
    predicted = predict_figures(case.scenario, profile)
    horizon = round(HORIZON_FACTOR * predicted["makespan_s"] + 10.0, 3)
    scenario = case.scenario.model_copy(update={"horizon": horizon})
    return replace(case, scenario=scenario, predicted=predicted)


def lengths(context: int, scale: PlanScale, output: float = 0.5) -> JsonDict:
    """Return length settings for requests that hold ``context`` tokens of KV on average.

    The output is ``output`` times ``context``. No request exceeds the longest context in ``scale``.
    """
    prompt, low, high = 3 * context // 4, int(output * context / 2), int(1.5 * output * context)
    return {
        "prompt_tokens": {
            "distribution": "lognormal",
            "mean": max(prompt, 2),
            "sigma": 0.7,
            "max": max(scale.context - high - 2, prompt, 2),
        },
        "output_tokens": {"distribution": "uniform", "low": max(low, 2), "high": max(high, 3)},
    }


def shortened(shape: JsonDict) -> JsonDict:
    """Return length settings that are a fifth shorter than ``shape``."""
    prompt, output = shape["prompt_tokens"], shape["output_tokens"]
    return {
        "prompt_tokens": {**prompt, "mean": int(0.8 * prompt["mean"])},
        "output_tokens": {
            **output,
            "low": max(int(0.8 * output["low"]), 2),
            "high": max(int(0.8 * output["high"]), 3),
        },
    }


def scenario_of(name: str, engine: Mapping[str, Any], workload: JsonDict) -> Scenario:
    """Return the scenario of an engine and a workload."""
    document = {"name": name, "engine": engine, "workload": workload, "profile": "unit-step"}
    return Scenario.model_validate(document)


def with_engine(scenario: Scenario, name: str, **knobs: Any) -> Scenario:
    """Return the scenario with another name and other settings of its engine."""
    engine = replace(scenario.engine, **knobs)
    return scenario.model_copy(update={"name": name, "engine": engine})


def with_seed(scenario: Scenario, seed: int) -> Scenario:
    """Return the scenario with another random seed. Listed requests do not change."""
    arrivals = scenario.workload.arrivals
    if arrivals is None:
        return scenario
    arrivals = arrivals.model_copy(update={"seed": seed})
    workload = scenario.workload.model_copy(update={"arrivals": arrivals})
    return scenario.model_copy(update={"workload": workload})


@lru_cache(maxsize=4)
def trace_requests(divisor: int, longest: int) -> list[JsonDict]:
    """Return the requests of the packaged trace of load spikes.

    Only requests shorter than ``longest`` tokens are returned.
    """
    path = packaged_trace("spikes.csv")
    workload = Workload.model_validate({"trace": path.name}, context={"folder": path.parent})
    rows = [listed_request(r, divisor) for r in build_clients(workload, None).requests]
    return [row for row in rows if row["prompt_tokens"] + row["output_tokens"] < longest]


def packaged_trace(name: str) -> Path:
    """Return the path of a packaged trace. Raises InputError if it is missing."""
    package = Path(__file__).parents[2]
    for folder in (package / "traces", package.parent / "traces"):
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"the packaged trace {name} is missing in this installation of simkv")


def listed_request(r: Request, divisor: int) -> JsonDict:
    """Return a request as scenario data, with its lengths divided by ``divisor``."""
    row: JsonDict = {
        "arrival": r.arrival,
        "prompt_tokens": max(r.prompt_tokens // divisor, 1),
        "output_tokens": max(r.output_tokens // divisor, 2),
    }
    shared = [s for s in r.segments if not s.stream.startswith("u")]
    if shared and (tokens := min(shared[0].end // divisor, row["prompt_tokens"])):
        row |= {"prefix_group": shared[0].stream[1:], "prefix_tokens": tokens}
    return row
