"""Results of a validation: all levels of all cases as JSON, Markdown tables and plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simkv.core.atomic_files import write_text
from simkv.costs.cost_profile import CostProfile, StepError
from simkv.report.plot_style import plot_settings, save
from simkv.validation.bootstrap import ConfidenceInterval
from simkv.validation.figure_comparison import FigureComparison, format_error, markdown
from simkv.validation.gpu_runs.comparison_levels import Validation
from simkv.validation.gpu_runs.device_drift import Sentinel, drift_lines
from simkv.validation.gpu_runs.gpu_plots import draw_figures, draw_steps
from simkv.validation.gpu_runs.run_ranking import JudgedTrial, Ranking, rankings
from simkv.validation.gpu_runs.stalled_steps import STALL_FACTOR
from simkv.validation.gpu_runs.timed_replay import Agreement

#: Figures of the page; the JSON file has all.
PAGE_FIGURES = (
    "makespan_s",
    "output_throughput",
    *(f"{name}.{s}" for name in ("ttft_ms", "tpot_ms", "e2e_ms") for s in ("mean", "p90", "p99")),
    "preemptions",
    "peak_blocks",
)
HELD = {None: "-", True: "holds", False: "does not"}


def write_gpu_report(
    folder: Path,
    judged: Sequence[JudgedTrial],
    profile: CostProfile,
    skipped: Sequence[str],
    sentinels: Sequence[Sentinel] = (),
) -> list[Path]:
    """Write ``validation.json``, ``validation.md``, ``steps.png`` and ``figures.png``."""
    ranked = rankings(judged)
    tables = _tables(judged, ranked, profile, skipped)
    tables["sentinels"] = [sentinel._asdict() for sentinel in sentinels]
    text = json.dumps(tables, indent=1, default=_plain)
    page = "\n".join(_page(judged, ranked, profile, skipped, sentinels)) + "\n"
    files = {"validation.json": text + "\n", "validation.md": page}
    for name, content in files.items():
        write_text(folder / name, content)
    found = [folder / name for name in files]
    if judged:
        with plot_settings():
            found.append(save(draw_steps(judged, profile), folder / "steps.png"))
            found.append(save(draw_figures(judged), folder / "figures.png"))
    return found


def _tables(
    judged: Sequence[JudgedTrial],
    ranked: Sequence[Ranking],
    profile: CostProfile,
    skipped: Sequence[str],
) -> dict[str, Any]:
    return {
        "profile": profile.name,
        "skipped": list(skipped),
        "machine": judged[0].run.about.get("machine") if judged else None,
        "cases": {
            one.trial.name: {"stresses": one.trial.stresses, **asdict(one.found)} for one in judged
        },
        "rankings": [{**asdict(r), "right": r.right} for r in ranked],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, StepError):
        return value.model_dump()
    raise TypeError(f"cannot be written as JSON: {value!r}")


def _page(
    judged: Sequence[JudgedTrial],
    ranked: Sequence[Ranking],
    profile: CostProfile,
    skipped: Sequence[str],
    sentinels: Sequence[Sentinel],
) -> Iterator[str]:
    """Yield the lines of the Markdown page."""
    yield f"# {profile.name} judged by real runs"
    yield ""
    yield f"Profile: {profile.model} on {profile.gpu}; {'; '.join(profile.source)}."
    if judged:
        machine = judged[0].run.about.get("machine", {})
        yield f"Served on: {', '.join(f'{k} {v}' for k, v in machine.items())}."
        if machine.get("device") not in (None, profile.gpu):
            yield "**Not the device that the profile is of**: its error is that of another one."
    yield from drift_lines(sentinels)
    if skipped:
        yield f"Not served for want of time: {', '.join(skipped)}."
    yield from ("", "## L0: the simulation, fed the measured times, decides the same", "")
    yield (
        "The served run and the simulation share one scheduler. This tests the plumbing between "
        "scheduler, clock, clients and device, not whether the rules are those of the engine that "
        "they are named after; `simkv conform` tests that."
    )
    yield ""
    yield from markdown(
        ["case", "decisions", "requests", "preemptions", "verdict"],
        [
            [
                one.trial.name,
                str(one.found.verdict.decisions),
                str(one.trial.scenario.workload.size),
                f"{one.figure('preemptions').real:.0f}",
                _same(one.found.verdict, "same"),
            ]
            for one in judged
        ],
    )
    yield from ("", "## L1: predicted against measured step times", "")
    yield (
        "Median and P95 of the absolute relative error, and the bias (mean with its sign), over "
        "all repeats; below each of the profile's where it lies for 95 of 100 resampled sets of "
        "steps (of fewer than a hundred steps P95 may well be larger). The constant step and the "
        "line over tokens are fitted to the first of these runs."
    )
    yield ""
    yield from markdown(["case", "kind", "steps", *_models(judged)], _step_rows(judged))
    yield from _stall_lines(judged)
    yield from ("", "## L2: a free simulation against the run", "")
    yield (
        "Errors are simulated over the mean of the repeats, less 1; *95 of 100*: where the "
        "profile's lies over resampled repeats. *Noise* is the largest difference between two "
        "repeats (A/A); *interval*: whether the run lies where the profile's own error puts it."
    )
    held = [f.held for one in judged for f in one.found.figures if f.held is not None]
    if held:
        yield f"Of {len(held)} figures {sum(held)} lie in their interval."
    for one in judged:
        yield from ("", f"### {one.trial.name}: {one.trial.stresses}", "")
        models = list(one.found.same_victims)
        rows = [_figure_row(one.figure(name), models) for name in PAGE_FIGURES]
        overlaps = [f"{100 * one.found.same_victims[model]:.0f} %" for model in models]
        rows.append(["same requests preempted", "", "", *overlaps, "", "", ""])
        titles = ["figure", "run", "simulated", *models, "95 of 100", "noise", "interval"]
        yield from markdown(titles, rows)
    if ranked:
        yield from ("", "## Which is better", "")
        yield "A case over the one beside it; the order counts where it is above twice the noise."
        yield ""
        words = {True: "right", False: "wrong", None: "within the noise"}
        yield from markdown(
            ["case", "over", "figure", "real", "simulated", "order"],
            [
                [r.case, r.beside, r.figure, f"{r.real:.3f}", f"{r.simulated:.3f}", words[r.right]]
                for r in ranked
            ],
        )


def _models(judged: Sequence[JudgedTrial]) -> list[str]:
    return list(judged[0].found.steps) if judged else []


def _step_rows(judged: Sequence[JudgedTrial]) -> list[list[str]]:
    rows = []
    for one in judged:
        steps: Mapping[str, Mapping[str, StepError]] = one.found.steps
        for kind, error in steps["profile"].items():
            shares = [
                " / ".join(format_error(x) for x in (e.median, e.p95, e.bias))
                for model in _models(judged)
                for e in [steps[model][kind]]
            ]
            rows.append([one.trial.name, kind, str(error.points), *shares])
            ends = one.found.step_ends["profile"][kind]
            between = " / ".join(_between(ends.get(name)) for name in ("median", "p95", "bias"))
            rows.append(["", "", "", between, *[""] * (len(shares) - 1)])
    return rows


def _between(ends: ConfidenceInterval | None) -> str:
    return "-" if ends is None else f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f} %"


def _stall_lines(judged: Sequence[JudgedTrial]) -> Iterator[str]:
    """Yield the lines on steps excluded from L1."""
    found = [
        (one.trial.name, number, stall)
        for one in judged
        for number, stalls in enumerate(one.found.stalls, start=1)
        for stall in stalls
    ]
    yield ""
    if not found:
        yield "No step is left out: none stalled."
        return
    yield (
        f"Left out are {len(found)} stalls, steps that took more than {STALL_FACTOR:g} times "
        "what is "
        "usual for their size. They are in the figures of L2."
    )
    yield ""
    rows = [
        [f"{name}-{run}", str(s.number), f"{1e3 * s.seconds:.1f}", f"{1e3 * s.usual_s:.1f}", s.side]
        for name, run, s in found
    ]
    yield from markdown(["run", "step", "took (ms)", "usual (ms)", "on the side of the"], rows, 1)


def _figure_row(f: FigureComparison, models: Sequence[str]) -> list[str]:
    errors = [format_error(f.error(model)) for model in models]
    about = [_between(f.error_interval()), format_error(f.noise), HELD[f.held]]
    return [f.name, f"{f.real:.3f}", f"{f.predicted:.3f}", *errors, *about]


def render_run_tables(variant: str, found: Validation) -> Iterator[str]:
    """Yield the tables of one run as lines of text."""
    verdict = found.verdict
    same = _same(verdict, "all the same")
    yield f"{variant}"
    yield f"  L0  {verdict.decisions} decisions, {same}"
    yield "  L1  error of step times (median, P95, bias)"
    for model, kinds in found.steps.items():
        for kind, error in kinds.items():
            shares = " ".join(
                f"{format_error(x):>10}" for x in (error.median, error.p95, error.bias)
            )
            yield f"      {model:<14}{kind:<11}{shares}  of {error.points} steps"
    models = list(found.same_victims)
    titles = [*models, "noise", "interval"]
    yield f"  L2  {'':<22}{'run':>12} " + "".join(f"{title:>14}" for title in titles)
    for f in found.figures:
        errors = [*(f.error(model) for model in models), f.noise]
        shares = "".join(f"{format_error(e):>14}" for e in errors)
        yield f"      {f.name:<22}{f.real:>12.3f} {shares}{HELD[f.held]:>14}"
    overlaps = "".join(f"{100 * found.same_victims[model]:>12.0f} %" for model in models)
    yield f"      {'same victims':<22}{'':>12} {overlaps}"


def _same(verdict: Agreement, same: str) -> str:
    return same if verdict.step is None else f"parts at decision {verdict.step}"
