"""What came of a validation: all levels of all cases as JSON, as a page of tables, as pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simkv.core.files import write_text
from simkv.costs.profile import Profile, StepError
from simkv.proof.validation.compared import Compared, markdown, share
from simkv.proof.validation.served.judge import Judged, Ranking, rankings
from simkv.proof.validation.served.levels import Validation
from simkv.proof.validation.served.plots import draw_figures, draw_steps
from simkv.proof.validation.served.replay import Agreement
from simkv.report.style import house_style, save

#: Figures of the page; the JSON file has all.
SHOWN = (
    "makespan_s",
    "output_throughput",
    *(f"{name}.{s}" for name in ("ttft_ms", "tpot_ms", "e2e_ms") for s in ("mean", "p90", "p99")),
    "preemptions",
    "peak_blocks",
)
HELD = {None: "-", True: "holds", False: "does not"}


def write(
    folder: Path, judged: Sequence[Judged], profile: Profile, skipped: Sequence[str]
) -> list[Path]:
    """Write ``validation.json``, ``validation.md``, ``steps.png`` and ``figures.png``."""
    ranked = rankings(judged)
    text = json.dumps(_tables(judged, ranked, profile, skipped), indent=1, default=_plain)
    page = "\n".join(_page(judged, ranked, profile, skipped)) + "\n"
    files = {"validation.json": text + "\n", "validation.md": page}
    for name, content in files.items():
        write_text(folder / name, content)
    found = [folder / name for name in files]
    if judged:
        with house_style():
            found.append(save(draw_steps(judged, profile), folder / "steps.png"))
            found.append(save(draw_figures(judged), folder / "figures.png"))
    return found


def _tables(
    judged: Sequence[Judged],
    ranked: Sequence[Ranking],
    profile: Profile,
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
    judged: Sequence[Judged],
    ranked: Sequence[Ranking],
    profile: Profile,
    skipped: Sequence[str],
) -> Iterator[str]:
    """The page, in Markdown."""
    yield f"# {profile.name} judged by real runs"
    yield ""
    yield f"Profile: {profile.model} on {profile.gpu}; {'; '.join(profile.source)}."
    if judged:
        machine = judged[0].run.about.get("machine", {})
        yield f"Served on: {', '.join(f'{k} {v}' for k, v in machine.items())}."
    if skipped:
        yield f"Not served for want of time: {', '.join(skipped)}."
    yield from ("", "## L0: the simulation, fed the measured times, decides the same", "")
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
    yield "Median and P95 of the absolute relative error, and the bias (mean with its sign)."
    yield ""
    yield from markdown(["case", "kind", "steps", *_models(judged)], _step_rows(judged))
    yield from ("", "## L2: a free simulation against the run", "")
    yield (
        "Errors are simulated over real, less 1. *Noise* is the largest difference to the same "
        "case served again; *interval*: whether the run lies where the profile's own error puts it."
    )
    held = [f.held for one in judged for f in one.found.figures if f.held is not None]
    if held:
        yield f"Of {len(held)} figures {sum(held)} lie in their interval."
    for one in judged:
        yield from ("", f"### {one.trial.name}: {one.trial.stresses}", "")
        models = list(one.found.same_victims)
        rows = [_figure_row(one.figure(name), models) for name in SHOWN]
        overlaps = [f"{100 * one.found.same_victims[model]:.0f} %" for model in models]
        rows.append(["same requests preempted", "", "", *overlaps, "", ""])
        yield from markdown(["figure", "run", "simulated", *models, "noise", "interval"], rows)
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


def _models(judged: Sequence[Judged]) -> list[str]:
    return list(judged[0].found.steps) if judged else []


def _step_rows(judged: Sequence[Judged]) -> list[list[str]]:
    rows = []
    for one in judged:
        steps: Mapping[str, Mapping[str, StepError]] = one.found.steps
        for kind, error in steps["profile"].items():
            shares = [
                " / ".join(share(x) for x in (e.median, e.p95, e.bias))
                for model in _models(judged)
                for e in [steps[model][kind]]
            ]
            rows.append([one.trial.name, kind, str(error.points), *shares])
    return rows


def _figure_row(f: Compared, models: Sequence[str]) -> list[str]:
    errors = [share(f.error(model)) for model in models]
    return [f.name, f"{f.real:.3f}", f"{f.predicted:.3f}", *errors, share(f.noise), HELD[f.held]]


def report(variant: str, found: Validation) -> Iterator[str]:
    """The tables of one run as lines of text."""
    verdict = found.verdict
    same = _same(verdict, "all the same")
    yield f"{variant}"
    yield f"  L0  {verdict.decisions} decisions, {same}"
    yield "  L1  error of step times (median, P95, bias)"
    for model, kinds in found.steps.items():
        for kind, error in kinds.items():
            shares = " ".join(f"{share(x):>10}" for x in (error.median, error.p95, error.bias))
            yield f"      {model:<14}{kind:<11}{shares}  of {error.points} steps"
    models = list(found.same_victims)
    titles = [*models, "noise", "interval"]
    yield f"  L2  {'':<22}{'run':>12} " + "".join(f"{title:>14}" for title in titles)
    for f in found.figures:
        errors = [*(f.error(model) for model in models), f.noise]
        shares = "".join(f"{share(e):>14}" for e in errors)
        yield f"      {f.name:<22}{f.real:>12.3f} {shares}{HELD[f.held]:>14}"
    overlaps = "".join(f"{100 * found.same_victims[model]:>12.0f} %" for model in models)
    yield f"      {'same victims':<22}{'':>12} {overlaps}"


def _same(verdict: Agreement, same: str) -> str:
    return same if verdict.step is None else f"parts at decision {verdict.step}"
