"""Serves the cases of a plan one after another on one runner, within a time.

    served = serve_cases(cases, setup, folder, deadline)

Every case leaves a folder ``runs/<case>-<n>`` as `simkv gpu serve` does, complete or not at all;
what is there already is not served again, so an interrupted validation goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from simkv.lab.runner import Runner, covering
from simkv.lab.serve import DeviceServer, check_fits, runner_config
from simkv.lab.served import Setup, write_served
from simkv.proof.validation.served.sizing import Trial
from simkv.proof.validation.served.suite import turns

#: A run is begun only if so many times its predicted length is left.
ROOM = 1.3


def print_nothing(line: str) -> None:
    """Where nobody listens."""


def serve_cases(
    cases: Sequence[Trial],
    setup: Setup,
    folder: Path,
    deadline: Callable[[], float],
    *,
    repeats: int = 2,
    say: Callable[[str], None] = print_nothing,
    advance: Callable[[], None] = lambda: None,
) -> list[str]:
    """Serve all ``turns`` for which ``deadline()``, the seconds left, suffices.

    Returns the names of those that were not served for want of time.
    """
    begin = perf_counter()
    wanted = turns(cases, repeats)
    left = [turn for turn in wanted if not (folder / "runs" / turn.name).exists()]
    if not left:
        return []
    config = covering([runner_config(case.scenario, setup) for case in cases])
    check_fits(setup, config)
    runner = Runner(setup.shape, config, setup.device)
    runner.warm_up(setup.warm_up)
    say(f"weights, {len(runner.graphs.sizes)} graphs, warm-up: {perf_counter() - begin:.1f} s")
    # Enough to bring the clocks up again after a pause for writing.
    setup = replace(setup, warm_up=min(setup.warm_up, 1.0))
    skipped = []
    for turn in left:
        if ROOM * turn.trial.predicted_s > deadline():
            skipped.append(turn.name)
            continue
        run = DeviceServer(turn.trial.scenario, setup, runner).serve(advance)
        write_served(folder / "runs" / turn.name, {"run": run}, setup)
        real, foreseen = run.summary["makespan_s"], turn.trial.predicted_s
        say(f"{turn.name}: {real:.2f} s, predicted {foreseen:.2f} s ({real / foreseen - 1:+.1%})")
    return skipped
