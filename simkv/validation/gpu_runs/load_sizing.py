"""Choose length and load of validation runs by simulation. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.request import Request
from simkv.costs.cost_profile import CostProfile
from simkv.metrics.run_metrics import summarize
from simkv.scenario.scenario import Scenario
from simkv.validation.gpu_runs.comparison_levels import simulate_with_profile
from simkv.workload.workload_section import Workload, build_clients

JsonDict = dict[str, Any]
#: Minimum and target number of preemptions of a run under memory pressure.
MIN_PREEMPTIONS, TARGET_PREEMPTIONS = 50, 80
#: Horizon of a run relative to its predicted duration.
HORIZON_FACTOR = 3.0


@dataclass(frozen=True)
class WorkloadScale:
    """Workload sizes in tokens.

    ``prompt`` and ``output`` are means, as are ``long_prompt`` and its ``short_output``.
    ``longest`` is the maximum request length, ``budget`` the tokens of a step; the rest are rows
    and blocks. Lengths of recorded and published workloads are divided by ``divisor``.
    """

    prompt: int
    output: int
    long_prompt: int
    short_output: int
    longest: int
    budget: int
    max_num_seqs: int
    num_blocks: int
    block_size: int = 16
    divisor: int = 1


@dataclass(frozen=True)
class Trial:
    """A scenario to be served; ``beside`` names the case that it is compared with.

    ``predicted`` are the figures predicted by the profile, as in ``summarize.json``.
    """

    name: str
    stresses: str
    scenario: Scenario
    predicted: dict[str, Any]
    beside: str | None = None

    @property
    def predicted_s(self) -> float:
        """Predicted duration in seconds."""
        return float(self.predicted["makespan_s"])


@dataclass(frozen=True)
class LoadSizer:
    """Chooses rates and numbers of requests by simulating with ``profile``."""

    profile: CostProfile
    seconds: float
    seed: int

    def drawn(
        self,
        name: str,
        engine: JsonDict,
        prompt: Any,
        output: Any,
        scale: WorkloadScale,
        load: float = 0.7,
    ) -> Scenario:
        """Return Poisson arrivals at a share ``load`` of the engine's capacity."""
        shape = {
            "prompt_tokens": clip_lengths(prompt, scale.longest // 2),
            "output_tokens": clip_lengths(output, scale.longest // 4),
        }
        return self._at_load(name, engine, shape, load)

    def make_pressure_scenario(
        self, name: str, engine: JsonDict, prompt: JsonDict, output: JsonDict
    ) -> Scenario:
        """Return a scenario with the largest pool that causes enough preemptions.

        If there is none, the run is extended to at most four times the seconds.
        """
        shape = {"prompt_tokens": prompt, "output_tokens": output}
        engine = {**engine, "max_model_len": prompt["high"] + output["high"]}
        least = engine["max_model_len"] // engine["block_size"] + 2
        for factor in (1, 2, 4):
            longer = replace(self, seconds=factor * self.seconds)
            calm = longer._at_load(name, engine, shape, 0.85)
            blocks = engine["num_gpu_blocks"]
            while blocks >= least:
                scenario = with_engine(calm, name, num_gpu_blocks=blocks)
                if self._figures(scenario)["preemptions"] >= TARGET_PREEMPTIONS:
                    return scenario
                blocks = int(0.9 * blocks)
        raise InputError(
            f"{name}: no pool gives {TARGET_PREEMPTIONS} preemptions in {4 * self.seconds:g} s; "
            "a longer --budget is needed"
        )

    def make_spike_scenario(self, name: str, engine: JsonDict, scale: WorkloadScale) -> Scenario:
        """Return a packaged trace of spikes with its rate scaled to the engine's capacity."""
        path = packaged_trace("spikes.csv")
        workload = Workload.model_validate({"trace": path.name}, context={"folder": path.parent})
        requests = build_clients(workload, None).requests
        longest = scale.longest - 1
        rows = [
            row
            for r in requests
            if (row := listed_request(r, scale.divisor))["prompt_tokens"] + row["output_tokens"]
            < longest
        ]

        def of(count: int) -> Scenario:
            return scenario_of(name, engine, {"requests": [dict(r) for r in rows[:count]]})

        sample = min(len(rows), 100)
        at_once = [{**row, "arrival": 0.0} for row in rows[:sample]]
        burst = self._figures(scenario_of(name, engine, {"requests": at_once}))
        rate = 0.6 * sample / burst["makespan_s"]
        begin, end = rows[0]["arrival"], rows[-1]["arrival"]
        pace = len(rows) / (end - begin) / rate
        for row in rows:
            row["arrival"] = round((row["arrival"] - begin) * pace, 6)
        count = max(min(int(rate * self.seconds), len(rows)), 12)
        return of(self.cut(of, count))

    def cut(self, of: Callable[[int], Scenario], count: int) -> int:
        """Return the number of requests, at most ``count``, that fit into the available time."""
        while count > 6 and self._figures(of(count))["makespan_s"] > 1.3 * self.seconds:
            count = max(3 * count // 4, 6)
        return count

    def _at_load(self, name: str, engine: JsonDict, shape: JsonDict, load: float) -> Scenario:
        def of(count: int, rate: float) -> Scenario:
            arrivals = {"num_prompts": count, "request_rate": rate, "seed": self.seed, **shape}
            return scenario_of(name, engine, {"arrivals": arrivals})

        sample = 64
        rate = load * sample / self._figures(of(sample, float("inf")))["makespan_s"]
        rate = float(f"{rate:.4g}")
        wanted = max(int(rate * self.seconds), 12)
        return of(self.cut(lambda count: of(count, rate), wanted), rate)

    def _figures(self, scenario: Scenario) -> dict[str, Any]:
        return predict_figures(scenario, self.profile)


def predict_figures(scenario: Scenario, profile: CostProfile) -> dict[str, Any]:
    """Return the request count and the figures of ``summarize.json`` predicted by ``profile``."""
    return {
        **summarize(simulate_with_profile(scenario, profile)),
        "requests": scenario.workload.size,
    }


def with_prediction(case: Trial, profile: CostProfile) -> Trial:
    """Return the case with the profile's prediction and a horizon derived from it."""
    predicted = predict_figures(case.scenario, profile)
    horizon = round(HORIZON_FACTOR * predicted["makespan_s"] + 10.0, 3)
    scenario = case.scenario.model_copy(update={"horizon": horizon})
    return replace(case, scenario=scenario, predicted=predicted)


def packaged_trace(name: str) -> Path:
    """Return the path of a packaged trace. Raises InputError if it is missing."""
    package = Path(__file__).parents[2]
    for folder in (package / "traces", package.parent / "traces"):
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"the trace {name} is not installed beside simkv")


def scenario_of(
    name: str, engine: Mapping[str, Any], workload: JsonDict, timeout: float | None = None
) -> Scenario:
    document = {"name": name, "engine": engine, "workload": workload, "profile": "unit-step"}
    return Scenario.model_validate({**document, "timeout": timeout})


def with_engine(scenario: Scenario, name: str, **knobs: Any) -> Scenario:
    engine = replace(scenario.engine, **knobs)
    return scenario.model_copy(update={"name": name, "engine": engine})


def listed_request(r: Request, divisor: int, *, timed: bool = False) -> JsonDict:
    """Return a request for a scenario with lengths (if ``timed``, also arrival) divided."""
    row: JsonDict = {
        "arrival": r.arrival / (divisor if timed else 1),
        "prompt_tokens": max(r.prompt_tokens // divisor, 1),
        "output_tokens": max(r.output_tokens // divisor, 2),
    }
    shared = [s for s in r.segments if not s.stream.startswith("u")]
    if shared and (tokens := min(shared[0].end // divisor, row["prompt_tokens"])):
        row |= {"prefix_group": shared[0].stream[1:], "prefix_tokens": tokens}
    return row


def clip_lengths(lengths: Any, most: int) -> Any:
    return {**lengths, "max": most} if isinstance(lengths, dict) else lengths
