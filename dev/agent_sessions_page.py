"""Write docs/incidents/agent-sessions.md: ``python -m dev.agent_sessions_page PAGE``.

The simulations take about ten minutes and need ``simkv[hardware]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import Environment, StrictUndefined

from simkv.api import run
from simkv.core.atomic_files import write_text
from simkv.metrics.run_metrics import prefix_hits
from simkv.metrics.run_result import RunResult

PAGE = Path(__file__).parent / "agent_sessions_page.md.j2"
SWEEP, ADMISSION = "llm-d-2348.yaml", "llm-d-2964.yaml"
#: Servers behind the router of the sweep; one of them is simulated.
SERVERS = 4
#: The hit rate is computed from the requests after this time (s).
WARM_UP = 600.0
#: Factor on all step times of the variant ``fitted``.
FACTOR = 1.3


@dataclass(frozen=True)
class Level:
    """Figures of the sweep at a number of sessions per server.

    ``throughput`` is in output tokens per second of all servers, ``ttft`` the median in seconds.
    """

    throughput: float
    hit_rate: float
    ttft: float


@dataclass(frozen=True)
class Arm:
    """Figures of a way to admit sessions: the makespan (s), the prefix cache hit rate, and the
    median and P95 latency of turns (s).
    """

    makespan: float
    hit_rate: float
    median: float
    p95: float


#: Published figures by sessions per server, for llm-d's default profile.
LEVELS = {
    12: Level(2014, 0.952, 0.4),
    24: Level(1541, 0.625, 0.5),
    32: Level(1151, 0.040, 8.2),
    48: Level(1065, 0.003, 36.0),
    64: Level(999, 0.002, 65.8),
}
#: Published figures of the first of three runs.
ARMS = {
    "default": Arm(457.5, 0.000, 150.7, 160.6),
    "decay": Arm(315.3, 0.345, 57.0, 250.4),
    "no-decay": Arm(3677.7, 0.462, 50.4, 1851.9),
}


def simulate_level(file: Path, sessions: int) -> dict[str, Level]:
    """Simulate the variants of one server of the sweep with a number of sessions."""
    outcome = run(file, workload__max_sessions=sessions)
    return {name: read_level(result) for name, result in outcome.results.items()}


def read_level(result: RunResult) -> Level:
    """Return the figures of a simulated level."""
    steady = [
        life
        for life in result.record.requests.values()
        if life.entered_at is not None and life.entered_at >= WARM_UP
    ]
    hits, queried = prefix_hits(steady)
    summary = result.summary
    return Level(
        SERVERS * summary["output_throughput"],
        hits / queried if queried else 0.0,
        summary["ttft_ms"]["median"] / 1000,
    )


def simulate_arms(file: Path, factor: float) -> dict[str, Arm]:
    """Simulate the three ways to admit sessions, with a factor on all step times."""
    scale = {"decode": factor, "prefill": factor, "mixed": factor}
    arms = {}
    for name, result in run(file, step_scale=scale).results.items():
        summary = result.summary
        turns = summary["sessions"]["turn_ms"]
        arms[name] = Arm(
            summary["makespan_s"],
            summary["prefix_cache"]["hit_rate"] / 100,
            turns["median"] / 1000,
            turns["p95"] / 1000,
        )
    return arms


def compare(ours: float, published: float, form: str) -> str:
    """Return a simulated figure with its error in percent, such as ``2,431 (+21 %)``."""
    return f"{ours:{form}} ({100 * (ours - published) / published:+.1f} %)"


def difference(ours: float, published: float) -> str:
    """Return a simulated hit rate with its difference from the published one."""
    return f"{ours:.3f} ({ours - published:+.3f})"


def level_row(sessions: int, by_name: Level, fitted: Level) -> str:
    """Return the table row of a number of sessions."""
    told = LEVELS[sessions]
    both = by_name, fitted
    cells = [str(sessions), f"{told.throughput:,.0f}"]
    cells += [compare(ours.throughput, told.throughput, ",.0f") for ours in both]
    cells += [f"{told.hit_rate:.3f}", *(difference(ours.hit_rate, told.hit_rate) for ours in both)]
    cells += [f"{told.ttft:.1f}", *(compare(ours.ttft, told.ttft, ".1f") for ours in both)]
    return f"| {' | '.join(cells)} |"


def arm_row(name: str, ours: Arm) -> str:
    """Return the table row of a way to admit sessions."""
    told = ARMS[name]
    cells = [name, f"{told.makespan:,.1f}", compare(ours.makespan, told.makespan, ",.1f")]
    cells += [f"{told.hit_rate:.3f}", difference(ours.hit_rate, told.hit_rate)]
    cells += [f"{told.median:,.0f}", compare(ours.median, told.median, ",.0f")]
    cells += [f"{told.p95:,.0f}", compare(ours.p95, told.p95, ",.0f")]
    return f"| {' | '.join(cells)} |"


def cliff(levels: Sequence[Level]) -> str:
    """Return the two numbers of sessions between which the hit rate falls most."""
    falls = [a.hit_rate - b.hit_rate for a, b in pairwise(levels)]
    place = falls.index(max(falls))
    numbers = list(LEVELS)
    return f"{numbers[place]} and {numbers[place + 1]}"


def main(page: Annotated[Path, typer.Argument(help="Page to write.")]) -> None:
    """Simulate both reports and write the page."""
    folder = page.parent
    with ProcessPoolExecutor(2) as pool:
        exact = pool.submit(simulate_arms, folder / ADMISSION, 1.0)
        slower = pool.submit(simulate_arms, folder / ADMISSION, FACTOR)
        jobs = [pool.submit(simulate_level, folder / SWEEP, one) for one in LEVELS]
        levels = [job.result() for job in jobs]
    by_name, fitted = ([level[name] for level in levels] for name in ("by-name", "fitted"))
    template = Environment(
        autoescape=False, keep_trailing_newline=True, undefined=StrictUndefined
    ).from_string(PAGE.read_text())
    text = template.render(
        levels=list(map(level_row, LEVELS, by_name, fitted)),
        arms=[arm_row(name, ours) for name, ours in exact.result().items()],
        slower={name: f"{ours.makespan:,.0f} s" for name, ours in slower.result().items()},
        published_cliff=cliff(list(LEVELS.values())),
        cliffs=[cliff(by_name), cliff(fitted)],
        factor=FACTOR,
    )
    write_text(page, text)


if __name__ == "__main__":
    typer.run(main)
