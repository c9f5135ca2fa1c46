"""Serves the cases of a plan one after another on one runner, within a time.

    served = serve_cases(cases, setup, folder, deadline)

Every case leaves a folder ``runs/<case>-<n>`` as `simkv gpu run` does, complete or not at all;
what is there already is not served again, so an interrupted validation goes on. Before, between
and after them one and the same step is timed (``sentinels.csv``), and the device tells of itself
all the while (``clocks.csv``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from simkv.core.errors import InputError
from simkv.costs.profile import Profile
from simkv.lab.clocks import clocks_logged
from simkv.lab.machine import machine
from simkv.lab.runner import Runner, covering
from simkv.lab.sentinel import sentinel_s
from simkv.lab.serve import check_fits, runner_config, serve_steadily
from simkv.lab.served import Setup, write_served
from simkv.proof.validation.served.drift import THE_END, note_sentinel
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
    with clocks_logged(folder / "clocks.csv", setup.device):
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
            note_sentinel(folder, turn.name, sentinel_s(runner))
            run = serve_steadily(turn.trial.scenario, setup, runner, advance)
            write_served(folder / "runs" / turn.name, {"run": run}, setup)
            real, foreseen = run.summary["makespan_s"], turn.trial.predicted_s
            change = f"{real / foreseen - 1:+.1%}"
            say(f"{turn.name}: {real:.2f} s, predicted {foreseen:.2f} s ({change})")
        note_sentinel(folder, THE_END, sentinel_s(runner))
    return skipped


def check_device(profile: Profile, setup: Setup, *, other_gpu: bool) -> None:
    """Raise InputError if the device is not the one that ``profile`` is of, unless that is meant.

    An H200 in the place of an H100 would be measured as the profile's error.
    """
    found = machine(setup.device)["device"]
    if found != profile.gpu and not other_gpu:
        raise InputError(
            f"{profile.name}: is a profile of {profile.gpu}, this is {found}; "
            "use --allow-other-gpu to judge it here all the same"
        )
