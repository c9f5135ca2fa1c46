"""Write docs/papers/vtc.md: ``python -m dev.vtc_page TRACE docs/papers/vtc.md``.

TRACE is the "real" trace of the VTC paper with the times measured under FCFS. It is not part of the
repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from jinja2 import Environment, StrictUndefined

from dev.vtc_trace import (
    FEATURES,
    FITTED_UNTIL,
    Served,
    build_costs,
    engine_config,
    fit_costs,
    limit_rate,
    read_measured,
    relative_errors,
    service_gaps,
    simulate,
    throughput,
)
from simkv.core.atomic_files import write_text

PAGE = Path(__file__).parent / "vtc_page.md.j2"
#: Published figures: tokens per second, and the maximum and the mean of the service gap.
PUBLISHED = {"fcfs": (776.9, 696, 302), "vtc": (778.8, 322, 145)}
#: Published figures for limits on requests per client and minute: tokens per second, and refused
#: requests.
PUBLISHED_LIMITS = {5: (340, 919), 30: (747, 176)}
LIMITS = (5, 10, 15, 20, 30)


def difference(ours: float, published: float) -> str:
    """Return the relative difference as text."""
    return f"{100 * (ours / published - 1):+.0f} %"


def policy_row(name: str, served: list[Served], published: tuple[float, float, float]) -> str:
    """Return a table row of a policy: published values, simulated values, and the difference."""
    gaps = service_gaps(served)
    ours = throughput(served), float(gaps.max()), float(gaps.mean())
    cells = [
        f"{theirs:,.0f} | {mine:,.0f} | {difference(mine, theirs)}"
        for theirs, mine in zip(published, ours, strict=True)
    ]
    return f"| {name} | {' | '.join(cells)} |"


def limit_row(limit: int, served: list[Served], refused: int) -> str:
    """Return a table row of a limit on requests per minute."""
    speed = throughput(served)
    theirs, theirs_refused = PUBLISHED_LIMITS.get(limit, (None, None))
    shown = "not given" if theirs is None else f"{theirs:,}"
    off = "" if theirs is None else difference(speed, theirs)
    count = "not given" if theirs_refused is None else f"{theirs_refused:,}"
    return f"| {limit} | {shown} | {speed:,.0f} | {off} | {count} | {refused:,} |"


def client_rows(runs: dict[str, list[Served]]) -> list[str]:
    """Return table rows with the mean time to the first token of the busiest clients and of the
    other clients.
    """
    trace = next(iter(runs.values()))
    counts: dict[str, int] = {}
    for one in trace:
        counts[one.client] = counts.get(one.client, 0) + 1
    busiest = set(sorted(counts, key=lambda name: -counts[name])[:4])
    rows = []
    for name, served in runs.items():
        groups: list[list[float]] = [[], []]
        for one in served:
            groups[one.client not in busiest].append(one.first - one.arrival)
        means = [f"{sum(times) / len(times):.1f} s" for times in groups]
        rows.append(f"| {name} | {means[0]} | {means[1]} |")
    return rows


def main(
    trace: Annotated[Path, typer.Argument(help="Measured trace (CSV, plain or gzip).")],
    page: Annotated[Path, typer.Argument(help="Page to write.")],
) -> None:
    """Fit costs to the times under FCFS, predict the other policies, and write the page."""
    measured = read_measured(trace)
    fcfs = engine_config("sglang", "fcfs")
    seconds = fit_costs(measured, fcfs)
    costs = build_costs(seconds.tolist())
    runs = {
        f"{engine} {policy}": simulate(measured, costs, engine_config(engine, policy))
        for engine in ("sglang", "vllm")
        for policy in ("fcfs", "vtc")
    }
    later = [number for number, one in enumerate(measured) if one.arrival >= FITTED_UNTIL]
    held_out = relative_errors(
        [measured[number] for number in later], [runs["sglang fcfs"][number] for number in later]
    )
    limits = {limit: limit_rate(measured, limit) for limit in LIMITS}
    text = Environment(
        autoescape=False, keep_trailing_newline=True, undefined=StrictUndefined
    ).from_string(PAGE.read_text())
    write_text(
        page,
        text.render(
            costs=dict(zip(FEATURES, (f"{value:.3g}" for value in seconds), strict=True)),
            fitted_until=FITTED_UNTIL,
            held_out=[f"{100 * error:.0f} %" for error in held_out],
            policies=[
                policy_row("FCFS, measured times", measured, PUBLISHED["fcfs"]),
                policy_row("FCFS, fitted", runs["sglang fcfs"], PUBLISHED["fcfs"]),
                policy_row("VTC, predicted", runs["sglang vtc"], PUBLISHED["vtc"]),
                policy_row("FCFS, vLLM 0.33 rules", runs["vllm fcfs"], PUBLISHED["fcfs"]),
                policy_row("VTC, vLLM 0.33 rules", runs["vllm vtc"], PUBLISHED["vtc"]),
            ],
            limits=[
                limit_row(limit, simulate(kept, costs, fcfs), len(measured) - len(kept))
                for limit, kept in limits.items()
            ],
            clients=client_rows(
                {
                    "FCFS, measured": measured,
                    "FCFS, fitted": runs["sglang fcfs"],
                    "VTC, predicted": runs["sglang vtc"],
                }
            ),
        ),
    )


if __name__ == "__main__":
    typer.run(main)
