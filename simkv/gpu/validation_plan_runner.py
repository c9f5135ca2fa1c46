"""Run the trials of a validation plan on one runner, within a time limit.

    skipped = execute_plan(cases, setup, folder, deadline)

Every run writes a directory ``runs/<case>-<n>``, as `simkv gpu run` does. Existing runs are not
repeated, so an interrupted validation can be resumed. Between runs, one fixed step is timed
(``sentinels.csv``), and the device's state is logged (``clocks.csv``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile
from simkv.gpu.batch_runner import covering_config
from simkv.gpu.device_clocks import log_clocks
from simkv.gpu.device_memory import new_runner
from simkv.gpu.execution_record import GpuSetup, write_executions
from simkv.gpu.machine_info import machine_info
from simkv.gpu.scenario_execution import execute_scenario, runner_config
from simkv.gpu.sentinel_step import time_sentinel
from simkv.validation.gpu_runs.device_drift import AFTER_LAST_RUN, note_sentinel
from simkv.validation.gpu_runs.load_sizing import Trial
from simkv.validation.gpu_runs.validation_suite import order_trial_runs

#: A run starts only if the remaining time is at least this factor times its predicted duration.
TIME_MARGIN = 1.3


def print_nothing(line: str) -> None:
    """Discard a line of output."""


def execute_plan(
    cases: Sequence[Trial],
    setup: GpuSetup,
    folder: Path,
    deadline: Callable[[], float],
    *,
    repeats: int = 2,
    say: Callable[[str], None] = print_nothing,
    advance: Callable[[], None] = lambda: None,
) -> list[str]:
    """Run the trials in the order of ``order_trial_runs`` and return the names of skipped runs.

    ``deadline`` returns the remaining seconds. A run is skipped if it would take longer.
    """
    begin = perf_counter()
    wanted = order_trial_runs(cases, repeats)
    left = [turn for turn in wanted if not (folder / "runs" / turn.name).exists()]
    if not left:
        return []
    config = covering_config([runner_config(case.scenario, setup) for case in cases])
    with log_clocks(folder / "clocks.csv", setup.device):
        runner = new_runner(setup, config)
        runner.warm_up(setup.warm_up)
        say(f"weights, {len(runner.graphs.sizes)} graphs, warm-up: {perf_counter() - begin:.1f} s")
        # Long enough to raise the clocks again after a pause for writing.
        setup = replace(setup, warm_up=min(setup.warm_up, 1.0))
        skipped = []
        for turn in left:
            if TIME_MARGIN * turn.trial.predicted_s > deadline():
                skipped.append(turn.name)
                continue
            note_sentinel(folder, turn.name, time_sentinel(runner))
            run = execute_scenario(turn.trial.scenario, setup, runner, advance)
            write_executions(folder / "runs" / turn.name, {"run": run}, setup)
            real, foreseen = run.summary["makespan_s"], turn.trial.predicted_s
            change = f"{real / foreseen - 1:+.1%}"
            say(f"{turn.name}: {real:.2f} s, predicted {foreseen:.2f} s ({change})")
        note_sentinel(folder, AFTER_LAST_RUN, time_sentinel(runner))
    return skipped


def check_device(profile: CostProfile, setup: GpuSetup, *, other_gpu: bool) -> None:
    """Raise InputError if ``profile`` is for another device. With ``other_gpu``, do nothing."""
    found = machine_info(setup.device)["device"]
    if found != profile.gpu and not other_gpu:
        raise InputError(
            f"{profile.name}: was measured on {profile.gpu}, but this GPU is {found}; to "
            "validate the profile here nevertheless, use --allow-other-gpu"
        )
