"""How long the runs of a validation are and under what load, by simulating with the profile.

Needs no torch.
"""

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
#: Preemptions that a run under memory pressure must have, and what is aimed at.
MIN_PREEMPTIONS, TARGET_PREEMPTIONS = 50, 80
#: A run may take this much longer than predicted before its horizon ends it.
HORIZON_FACTOR = 3.0


@dataclass(frozen=True)
class WorkloadScale:
    """Sizes in tokens: means of ``prompt`` and ``output``, of ``long_prompt`` and its
    ``short_output``, the ``longest`` request, the ``budget`` of a step; rows and blocks.

    Lengths of recorded and of published workloads are divided by ``divisor``.
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
    """A scenario to be served; ``beside`` names the case that it is to be compared with.

    ``predicted`` are the figures that the profile foresees, as in ``summarize.json``.
    """

    name: str
    stresses: str
    scenario: Scenario
    predicted: dict[str, Any]
    beside: str | None = None

    @property
    def predicted_s(self) -> float:
        """Seconds that serving it should take."""
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
        """Poisson arrivals at a share ``load`` of what the engine can serve."""
        shape = {
            "prompt_tokens": clip_lengths(prompt, scale.longest // 2),
            "output_tokens": clip_lengths(output, scale.longest // 4),
        }
        return self._at_load(name, engine, shape, load)

    def make_pressure_scenario(
        self, name: str, engine: JsonDict, prompt: JsonDict, output: JsonDict
    ) -> Scenario:
        """The largest of some pools in which enough requests are preempted.

        If there is none, the run is made longer, to four times the seconds at most.
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
        """A packaged trace of spikes, its rate scaled to what the engine can serve."""
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
        """As many requests, ``count`` at most, as are served in the time that there is."""
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
    """What ``profile`` predicts, as in ``summarize.json``, and how many requests there are."""
    return {
        **summarize(simulate_with_profile(scenario, profile)),
        "requests": scenario.workload.size,
    }


def with_prediction(case: Trial, profile: CostProfile) -> Trial:
    """The case with what ``profile`` predicts, and a horizon that ends it if all goes wrong."""
    predicted = predict_figures(case.scenario, profile)
    horizon = round(HORIZON_FACTOR * predicted["makespan_s"] + 10.0, 3)
    scenario = case.scenario.model_copy(update={"horizon": horizon})
    return replace(case, scenario=scenario, predicted=predicted)


def packaged_trace(name: str) -> Path:
    """A trace that comes with simkv. Raises InputError if it is not there."""
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
    """A request as a scenario lists it, its lengths divided; with ``timed`` its arrival too."""
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
