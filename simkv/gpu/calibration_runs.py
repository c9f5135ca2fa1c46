"""The short real runs of a campaign: one to fit what serving adds, the others to judge it.

They differ in load, in the lengths of prompts and in the tokens of a step, so that the error that
is told is that of sizes which nothing was fitted to. Each begins with all that it may have at a
time, so steps are full; then one request comes for one that ends, in chunks as long as prompts are;
in the end only decodes are left, fewer and fewer. So none depends on how fast the device is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from simkv.gpu.batch_runner import Runner, covering_config
from simkv.gpu.campaign_plan import Limits
from simkv.gpu.execution_record import ExecutionRecord, GpuSetup
from simkv.gpu.scenario_execution import check_fits, execute_scenario, runner_config
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import DEFAULT

#: What the name of a run with a pipelined scheduler ends in.
OVERLAPPED = "-overlapped"


@dataclass(frozen=True)
class CalibrationLoad:
    """What one run serves: requests in flight at most, tokens of a prompt on average, tokens of a
    step at most."""

    name: str
    in_flight: int
    prompt: int
    budget: int

    def scenario(self, limits: Limits, *, pipelined: bool = False) -> Scenario:
        """Twice as many requests as may be in flight, as a scenario within ``limits``.

        With ``pipelined`` the scheduler decides a step ahead. None ends before all have their
        prompts in, so that as many decode as may.
        """
        longest = limits.context // 2
        shortest_output = max(16, self.in_flight * self.prompt // self.budget)
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
    """The run on which is fitted what serving adds: one decode to all, steps of middle size."""
    budget = max(limits.decodes, min(limits.tokens // 4, 2048))
    return CalibrationLoad("fitted", limits.decodes, limits.context // 16, budget)


def evaluation_loads(limits: Limits) -> list[CalibrationLoad]:
    """The runs on which it is judged: few requests with long prompts in steps as large as may be,
    and many with short ones in small steps."""
    few = max(limits.decodes // 8, 8)
    small = max(limits.decodes, limits.tokens // 16)
    return [
        CalibrationLoad(
            "few-and-long", few, limits.context // 4, max(limits.decodes, limits.tokens)
        ),
        CalibrationLoad("many-and-short", limits.decodes, limits.context // 64, small),
    ]


def run_calibration_loads(setup: GpuSetup, limits: Limits) -> Iterator[tuple[str, ExecutionRecord]]:
    """All of them by name on one runner, each as it ends, that which is fitted to first.

    Where steps overlap, the runs that judge once more, with a pipelined scheduler. Raises
    InputError if model and cache do not fit the device.
    """
    setup = replace(setup, warm_up=min(setup.warm_up, 2.0))  # it has just been busy
    works = [fit_load(limits), *evaluation_loads(limits)]
    scenarios = [work.scenario(limits) for work in works]
    if setup.overlap:
        scenarios += [work.scenario(limits, pipelined=True) for work in evaluation_loads(limits)]
    config = covering_config(runner_config(scenario, setup) for scenario in scenarios)
    check_fits(setup, config)
    runner = Runner(setup.shape, config, setup.device)
    for scenario in scenarios:
        yield scenario.name, execute_scenario(scenario, setup, runner)
