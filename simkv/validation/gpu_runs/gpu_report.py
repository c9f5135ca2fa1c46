"""Results of a validation as JSON, Markdown tables and plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from simkv.core.atomic_files import write_text
from simkv.costs.cost_profile import CostProfile, StepError
from simkv.report.plot_style import plot_settings, save
from simkv.validation.bootstrap import ConfidenceInterval
from simkv.validation.figure_comparison import FigureComparison, format_error, markdown
from simkv.validation.gpu_runs.comparison_levels import (
    USEFUL_WIDTH,
    Validation,
    score_intervals,
)
from simkv.validation.gpu_runs.device_drift import Sentinel, drift_lines
from simkv.validation.gpu_runs.gpu_plots import draw_figures, draw_steps
from simkv.validation.gpu_runs.run_ranking import JudgedTrial, Ranking, rankings
from simkv.validation.gpu_runs.stalled_steps import STALL_FACTOR
from simkv.validation.gpu_runs.timed_replay import Agreement

#: Metrics on the page; the JSON file has all metrics.
PAGE_FIGURES = (
    "makespan_s",
    "output_throughput",
    *(f"{name}.{s}" for name in ("ttft_ms", "tpot_ms", "e2e_ms") for s in ("mean", "p90", "p99")),
    "preemptions",
    "peak_blocks",
)
HELD = {None: "-", True: "holds", False: "does not hold"}


def write_gpu_report(
    folder: Path,
    judged: Sequence[JudgedTrial],
    profiles: Mapping[str, CostProfile],
    skipped: Sequence[str],
    sentinels: Sequence[Sentinel] = (),
) -> list[Path]:
    """Write ``validation.json``, ``validation.md``, ``steps.png`` and ``figures.png``."""
    ranked = rankings(judged)
    tables = {
        "profiles": {name: profile.name for name, profile in profiles.items()},
        "skipped": list(skipped),
        "machine": judged[0].run.about.get("machine") if judged else None,
        "trials": {
            one.trial.name: {
                "stresses": one.trial.stresses,
                "profile": one.trial.profile,
                "intervals": asdict(one.score) if one.score else None,
                **asdict(one.found),
            }
            for one in judged
        },
        "models": {
            name: {model: asdict(score) for model, score in compare_models(judged, name).items()}
            for name in profiles
        },
        "rankings": [{**asdict(r), "right": r.right} for r in ranked],
        "sentinels": [sentinel._asdict() for sentinel in sentinels],
    }
    text = json.dumps(tables, indent=1, default=_plain)
    page = "\n".join(_page(judged, ranked, profiles, skipped, sentinels)) + "\n"
    files = {"validation.json": text + "\n", "validation.md": page}
    for name, content in files.items():
        write_text(folder / name, content)
    found = [folder / name for name in files]
    if judged:
        with plot_settings():
            found.append(save(draw_steps(judged, profiles), folder / "steps.png"))
            found.append(save(draw_figures(judged), folder / "figures.png"))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, StepError):
        return value.model_dump()
    raise TypeError(f"cannot be written as JSON: {value!r}")


@dataclass(frozen=True)
class ModelScore:
    """Step errors of a cost model over all trials.

    ``median`` and ``p95`` are the median and P95 of the relative step errors of a trial, averaged
    over the trials. ``wins`` is the number of trials in which the profile has the smaller median
    error.
    """

    median: float
    p95: float
    wins: int
    trials: int


def compare_models(judged: Sequence[JudgedTrial], profile: str) -> dict[str, ModelScore]:
    """Return the score of each cost model over all trials that ``profile`` predicts."""
    errors = [one.found.steps for one in judged if one.trial.profile == profile]
    models = [m for m in (errors[0] if errors else {}) if all(m in found for found in errors)]
    return {
        model: ModelScore(
            fmean(found[model]["all"].median for found in errors),
            fmean(found[model]["all"].p95 for found in errors),
            sum(found["profile"]["all"].median < found[model]["all"].median for found in errors),
            len(errors),
        )
        for model in models
    }


def _page(
    judged: Sequence[JudgedTrial],
    ranked: Sequence[Ranking],
    profiles: Mapping[str, CostProfile],
    skipped: Sequence[str],
    sentinels: Sequence[Sentinel],
) -> Iterator[str]:
    """Yield the lines of the Markdown page."""
    main = next(iter(profiles.values()))
    yield f"# Validation of {main.name}"
    yield ""
    yield f"Profile: {main.model} on {main.gpu}; {'; '.join(main.source)}."
    if judged:
        machine = judged[0].run.about.get("machine", {})
        yield f"Served on: {', '.join(f'{k} {v}' for k, v in machine.items())}."
        if machine.get("device") not in (None, main.gpu):
            yield "**Other device**: the profile was measured on a different GPU."
    yield from drift_lines(sentinels)
    if skipped:
        yield f"Not served because time ran out: {', '.join(skipped)}."
    yield from ("", "## Summary", "")
    for name in profiles:
        yield from _summary(judged, name)
    yield from ("", "## L0: decisions of the simulation with the measured times", "")
    yield (
        "The run and the simulation share one scheduler. This tests the connection of scheduler, "
        "clock, clients and device, not whether the rules are those of the named engine; "
        "`simkv conform` tests that."
    )
    yield ""
    yield from markdown(
        ["trial", "decisions", "requests", "preemptions", "verdict"],
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
        "Median and P95 of the absolute relative error, and the bias (signed mean). Below those of "
        "the profile are their 95 % intervals over resampled steps; with fewer than a hundred "
        "steps, P95 may be larger. All models except the roofline and the composed costs are "
        "fitted to the same campaign as the profile."
    )
    yield ""
    yield from markdown(["trial", "kind", "steps", *_models(judged)], _step_rows(judged))
    yield from _stall_lines(judged)
    yield from _composed_lines(judged)
    yield from ("", "## L2: a free simulation against the run", "")
    yield (
        "Errors are relative to the run, or to the mean of its repeats. *Noise* is the largest "
        "difference between two repeats with the same seed. *Interval*: whether the run lies in "
        "the interval that a simulation with this profile prints."
    )
    for one in judged:
        yield from ("", f"### {one.trial.name}: {one.trial.stresses}", "")
        models = list(one.found.same_victims)
        rows = [_figure_row(one.figure(name), models) for name in PAGE_FIGURES]
        overlaps = [f"{100 * one.found.same_victims[model]:.0f} %" for model in models]
        rows.append(["same requests preempted", "", "", *overlaps, "", "", ""])
        titles = ["figure", "run", "simulated", *models, "95 % interval", "noise", "interval"]
        yield from markdown(titles, rows)
    if ranked:
        yield from ("", "## Comparison of pairs", "")
        yield "Ratio of a trial to the other; the order counts above twice the noise."
        yield ""
        words = {True: "right", False: "wrong", None: "within the noise"}
        yield from markdown(
            ["trial", "over", "figure", "real", "simulated", "order"],
            [
                [r.case, r.beside, r.figure, f"{r.real:.3f}", f"{r.simulated:.3f}", words[r.right]]
                for r in ranked
            ],
        )


def _summary(judged: Sequence[JudgedTrial], profile: str) -> Iterator[str]:
    """Yield lines with the step errors of all models and the score of the profile's intervals."""
    scores = compare_models(judged, profile)
    if not scores:
        return
    count = scores["profile"].trials
    yield f"Step errors with {profile}.json, means over {count} trials:"
    yield ""
    yield from markdown(
        ["cost model", "median", "P95", "trials in which the profile is better"],
        [
            [
                model,
                f"{100 * score.median:.1f} %",
                f"{100 * score.p95:.1f} %",
                "-" if model == "profile" else f"{score.wins} of {score.trials}",
            ]
            for model, score in scores.items()
        ],
        1,
    )
    yield ""
    figures = [f for one in judged if one.trial.profile == profile for f in one.found.figures]
    if score := score_intervals(figures):
        yield (
            f"Intervals of {score.figures} figures: {score.held} contain the run, {score.useful} "
            f"of these with a width of at most {100 * USEFUL_WIDTH:.0f} %; median width "
            f"{100 * score.width:.1f} %, mean interval score {100 * score.score:.1f} % (less is "
            "better)."
        )
        yield ""


def _composed_lines(judged: Sequence[JudgedTrial]) -> Iterator[str]:
    """Yield the table of the measured step times divided by the composed step times."""
    yield ""
    rows = [
        [one.trial.name, kind, *(f"{ratio:.2f}" for ratio in ratios)]
        for one in judged
        for kind, ratios in one.found.over_composed.items()
    ]
    if not rows:
        yield (
            "simkv has no operator data for this GPU or model, so there are no computed step "
            "times to compare with."
        )
        return
    yield "Measured step time over the one that `hardware: {gpu, model}` composes:"
    yield ""
    yield from markdown(["trial", "kind", "P10", "median", "P90"], rows, 2)


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
    """Yield the lines about stalled steps, which are excluded from the comparison of step times."""
    found = [
        (one.trial.name, number, stall)
        for one in judged
        for number, stalls in enumerate(one.found.stalls, start=1)
        for stall in stalls
    ]
    yield ""
    if not found:
        yield "No step stalled, so none is left out."
        return
    yield (
        f"{len(found)} stalled steps are left out: they took more than {STALL_FACTOR:g} times the "
        "usual time of their size. The figures of L2 include them."
    )
    yield ""
    rows = [
        [f"{name}-{run}", str(s.number), f"{1e3 * s.seconds:.1f}", f"{1e3 * s.usual_s:.1f}", s.side]
        for name, run, s in found
    ]
    yield from markdown(["run", "step", "time (ms)", "usual (ms)", "cause"], rows, 1)


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
    return same if verdict.step is None else f"differs at decision {verdict.step}"
