"""Short real runs of a calibration: one to fit the cost of serving, and others to evaluate the fit.

The runs differ in load, prompt lengths and step sizes. Each run starts with its maximum number of
requests, and a new request replaces each finished one. At the end only decodes remain. The steps of
a run therefore do not depend on the speed of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from simkv.gpu.batch_runner import covering_config
from simkv.gpu.campaign_plan import Limits
from simkv.gpu.device_memory import new_runner
from simkv.gpu.execution_record import ExecutionRecord, GpuSetup
from simkv.gpu.scenario_execution import execute_scenario, runner_config
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import DEFAULT

#: Suffix of the names of runs with a pipelined scheduler.
OVERLAPPED = "-overlapped"


@dataclass(frozen=True)
class CalibrationLoad:
    """Load of one run.

    ``in_flight`` is the maximum number of concurrent requests. ``prompt`` is the mean number of
    prompt tokens. ``budget`` is the maximum number of tokens per step.
    """

    name: str
    in_flight: int
    prompt: int
    budget: int
    shortest_output: int = 16

    def scenario(self, limits: Limits, *, pipelined: bool = False) -> Scenario:
        """Return a scenario with this load. It has twice as many requests as ``in_flight``.

        With ``pipelined``, the scheduler is one step ahead of the device.
        """
        longest = limits.context // 2
        shortest_output = max(self.shortest_output, self.in_flight * self.prompt // self.budget)
        longest_output = 3 * shortest_output
        return Scenario.model_validate(
            {
                "name": self.name + OVERLAPPED * pipelined,
                "workload": {
                    "max_concurrency": self.in_flight,
                    "arrivals": {
                        "num_prompts": 2 * self.in_flight,
                        "request_rate": 1e6,
                        "prompt_tokens": {
                            "distribution": "lognormal",
                            "mean": self.prompt,
                            "max": longest,
                        },
                        "output_tokens": {
                            "distribution": "uniform",
                            "low": shortest_output,
                            "high": longest_output,
                        },
                    },
                },
                "engine": {
                    "name": DEFAULT.name,
                    "block_size": limits.block_size,
                    "num_gpu_blocks": limits.kv_tokens // limits.block_size,
                    "max_num_seqs": limits.decodes,
                    "max_num_batched_tokens": self.budget,
                    "max_model_len": longest + longest_output + 1,
                    "async_scheduling": pipelined,
                },
                "profile": "unit-step",
            }
        )


def fit_load(limits: Limits) -> CalibrationLoad:
    """Return the load of the run that measures the serving overhead.

    The run has steps with every number of decodes, and its steps have a medium number of tokens. As
    in many chats, the mean output length is two thirds of the mean prompt length.
    """
    budget = max(limits.decodes, min(limits.tokens // 4, 2048))
    prompt = limits.context // 16
    return CalibrationLoad("fitted", limits.decodes, prompt, budget, max(prompt // 3, 16))


def evaluation_loads(limits: Limits) -> list[CalibrationLoad]:
    """Return two loads for evaluation: few requests with long prompts, and many requests with short
    prompts.
    """
    few = max(limits.decodes // 8, 8)
    small = max(limits.decodes, limits.tokens // 16)
    return [
        CalibrationLoad(
            "few-and-long", few, limits.context // 4, max(limits.decodes, limits.tokens)
        ),
        CalibrationLoad("many-and-short", limits.decodes, limits.context // 64, small),
    ]


def run_calibration_loads(setup: GpuSetup, limits: Limits) -> Iterator[tuple[str, ExecutionRecord]]:
    """Run all loads on one runner, and yield the name and record of each run.

    The load for fitting comes first. If steps overlap, all loads run with a pipelined scheduler and
    then with a synchronous scheduler. Raises InputError if model and cache do not fit on the
    device.
    """
    setup = replace(setup, warm_up=min(setup.warm_up, 2.0))  # the device is already warm
    works = [fit_load(limits), *evaluation_loads(limits)]
    modes = (True, False) if setup.overlap else (False,)
    scenarios = [work.scenario(limits, pipelined=mode) for mode in modes for work in works]
    config = covering_config(runner_config(scenario, setup) for scenario in scenarios)
    runner = new_runner(setup, config)
    for scenario in scenarios:
        yield scenario.name, execute_scenario(scenario, setup, runner)
