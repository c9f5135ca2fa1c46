"""What came of a validation: all levels of all cases as JSON, as a page of tables, as pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simkv.core.files import write_text
from simkv.costs.profile import Profile, StepError
from simkv.lab.replay import Recorded, read_runs
from simkv.lab.sizing import Case
from simkv.lab.suite import Turn
from simkv.lab.validate import Figure, Validation, share, validation

#: Figures of the page; the JSON file has all.
SHOWN = (
    "makespan_s",
    "output_throughput",
    *(f"{name}.{s}" for name in ("ttft_ms", "tpot_ms", "e2e_ms") for s in ("mean", "p90", "p99")),
    "preemptions",
    "peak_blocks",
)
#: Figures that pairs of cases are ranked by.
RANKED = ("makespan_s", "ttft_ms.p99", "tpot_ms.p99", "e2e_ms.mean")


@dataclass(frozen=True)
class Judged:
    """A case, its first run, and what came of it."""

    case: Case
    run: Recorded
    found: Validation

    def figure(self, name: str) -> Figure:
        """One of the compared figures."""
        return next(f for f in self.found.figures if f.name == name)


@dataclass(frozen=True)
class Ranking:
    """A case over the one beside it, by one figure: really, as simulated, and what is noise.

    ``right`` is whether the simulation has the order right; None if the real difference is below
    twice the noise.
    """

    case: str
    beside: str
    figure: str
    real: float
    simulated: float
    noise: float

    @property
    def right(self) -> bool | None:
        if abs(self.real - 1.0) <= 2 * self.noise:
            return None
        return (self.real > 1.0) == (self.simulated > 1.0)


def judge(cases: Sequence[Case], profile: Profile, folder: Path) -> list[Judged]:
    """Judge ``profile`` by every case that was served into ``folder``, its repeats as the noise."""
    judged = []
    for case in cases:
        runs: list[Recorded] = []
        while (path := folder / "runs" / Turn(case, len(runs) + 1).name).exists():
            runs.append(read_runs(path)["run"])
        if runs:
            judged.append(Judged(case, runs[0], validation(runs[0], profile, runs[1:])))
    return judged


def rankings(judged: Sequence[Judged]) -> list[Ranking]:
    """All pairs of cases that are to be compared."""
    by_name = {one.case.name: one for one in judged}
    found = []
    for one in judged:
        other = by_name.get(one.case.beside or "")
        if other is None:
            continue
        for name in RANKED:
            a, b = one.figure(name), other.figure(name)
            known = [f.noise for j in judged for f in [j.figure(name)] if f.noise is not None]
            if a.real and b.real and b.simulated["profile"]:
                simulated = a.simulated["profile"] / b.simulated["profile"]
                noise = max(known, default=0.0)
                pair = (one.case.name, other.case.name)
                found.append(Ranking(*pair, name, a.real / b.real, simulated, noise))
    return found


def write(
    folder: Path, judged: Sequence[Judged], profile: Profile, skipped: Sequence[str]
) -> list[Path]:
    """Write ``validation.json``, ``validation.md``, ``steps.png`` and ``figures.png``."""
    from simkv.lab.suite_plots import draw_figures, draw_steps
    from simkv.report.style import house_style, save

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
            one.case.name: {"stresses": one.case.stresses, **asdict(one.found)} for one in judged
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
    yield from _table(
        ["case", "decisions", "requests", "preemptions", "verdict"],
        [
            [
                one.case.name,
                str(one.found.verdict.decisions),
                str(one.case.scenario.workload.size),
                f"{one.figure('preemptions').real:.0f}",
                "same"
                if one.found.verdict.step is None
                else f"parts at decision {one.found.verdict.step}",
            ]
            for one in judged
        ],
    )
    yield from ("", "## L1: predicted against measured step times", "")
    yield "Median and P95 of the absolute relative error, and the bias (mean with its sign)."
    yield ""
    yield from _table(["case", "kind", "steps", *_models(judged)], _step_rows(judged))
    yield from ("", "## L2: a free simulation against the run", "")
    yield (
        "Errors are simulated over real, less 1. *Noise* is the largest difference to the same "
        "case served again; *interval*: whether the run lies where the profile's own error puts it."
    )
    held = [f.held for one in judged for f in one.found.figures if f.held is not None]
    if held:
        yield f"Of {len(held)} figures {sum(held)} lie in their interval."
    for one in judged:
        yield from ("", f"### {one.case.name}: {one.case.stresses}", "")
        models = list(one.found.same_victims)
        rows = [_figure_row(one.figure(name), models) for name in SHOWN]
        overlaps = [f"{100 * one.found.same_victims[model]:.0f} %" for model in models]
        rows.append(["same requests preempted", "", "", *overlaps, "", ""])
        yield from _table(["figure", "run", "simulated", *models, "noise", "interval"], rows)
    if ranked:
        yield from ("", "## Which is better", "")
        yield "A case over the one beside it; the order counts where it is above twice the noise."
        yield ""
        words = {True: "right", False: "wrong", None: "within the noise"}
        yield from _table(
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
            rows.append([one.case.name, kind, str(error.points), *shares])
    return rows


def _figure_row(f: Figure, models: Sequence[str]) -> list[str]:
    held = {None: "-", True: "holds", False: "does not"}[f.held]
    ours = f.simulated["profile"]
    errors = [share(f.error(model)) for model in models]
    return [f.name, f"{f.real:.3f}", f"{ours:.3f}", *errors, share(f.noise), held]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(' --- ' for _ in head)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
