"""Result of a policy search: its summary as text, its files, and its data for Python."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.atomic_files import make_folder, write_bytes, write_text
from simkv.core.csv_writer import write_rows
from simkv.core.figure_registry import METRICS
from simkv.core.policy_language import (
    ENGINE_VARIABLES,
    REQUEST_VARIABLES,
    PolicyHook,
    parse_policy,
)
from simkv.scenario.run_fields import find_custom_sources, find_profiles
from simkv.scenario.scenario_writer import to_yaml
from simkv.study.evolve.evolution import Evolution
from simkv.study.evolve.tournament import (
    PART_PENALTY,
    SHIPPED,
    UNSERVED_WEIGHT,
    CandidateScore,
)
from simkv.study.evolve.winner_evaluation import Improvement, RequestClassCost, WinnerEvaluation
from simkv.study.sweep_axes import format_assignment
from simkv.workload.workload_section import build_clients

#: Meaning of a constant expression, by the result type of its hook.
_CONSTANT = {
    "order": "all equal, so arrival order applies",
    "group": "all equal",
}


def write_evolution(found: Evolution, folder: Path) -> list[str]:
    """Write ``candidates.csv``, ``evolve.md`` and ``winner.yaml``, and return their names.

    ``winner.yaml`` is a scenario with the engine's scheduler and the winner as variants.
    """
    write_rows(folder / "candidates.csv", candidate_rows(found))
    write_text(folder / "evolve.md", "\n".join(summarize_evolution(found)) + "\n")
    trial = found.split.train[0]
    both = {"shipped": SHIPPED.apply_to(trial), "evolved": found.winner.candidate.apply_to(trial)}
    text = to_yaml(both)
    for scenario in both.values():
        for path in find_profiles(scenario).values():
            if path.endswith(".json"):
                write_bytes(folder / Path(path).name, (trial.folder / path).read_bytes())
        for source in find_custom_sources(scenario).values():
            write_bytes(folder / Path(source.path).name, source.code)
    write_text(folder / "winner.yaml", text)
    return ["candidates.csv", "evolve.md", "winner.yaml"]


def candidate_rows(found: Evolution) -> list[dict[str, Any]]:
    """Return one row per candidate. The first row is the engine's scheduler.

    The column ``final`` contains the score in the final round.
    """
    final = {one.candidate.key: one for one in found.final}
    tried = final | {one.candidate.key: one for one in found.standings}
    front = {one.candidate.key for one in found.front}
    keys = dict.fromkeys((*(one.candidate.key for one in found.standings), *final))
    rows = []
    for number, key in enumerate(keys):
        row = {"number": number, **_row(tried[key], found), "front": key in front}
        rows.append(row | {"final": final[key].score if key in final else None})
    return rows


def _row(one: CandidateScore, found: Evolution) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for goal, loss in zip(found.goals, one.loss, strict=True):
        values = [value[goal.figure] for value in one.values]
        known = [value for value in values if value is not None]
        row[goal.figure] = sum(known) / len(known) if known else None
        row[f"gain.{goal.figure}"] = -loss
    row |= {
        "unserved": one.unserved,
        "parts": one.candidate.parts,
        "score": one.score,
        "why": one.why,
    }
    said = dict(one.candidate.change)
    row["candidate"] = json.dumps(said) if said else "shipped"
    return row


@dataclass(frozen=True)
class EvolutionResult:
    """Result of a search for a better scheduler. As text, it is the output of ``simkv evolve``."""

    evolution: Evolution

    @property
    def winner(self) -> dict[str, Any]:
        """Fields that the winner changes, with their values; empty if no candidate is better."""
        return dict(self.evolution.winner.candidate.change)

    @property
    def holds(self) -> bool:
        """Whether the winner is significantly better than the engine's scheduler in every
        evaluation.
        """
        return self.evolution.holds

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """Table with the rows of candidates.csv, one per candidate."""
        return pd.DataFrame(candidate_rows(self.evolution))

    def __str__(self) -> str:
        return "\n".join(summarize_evolution(self.evolution))

    def __repr__(self) -> str:
        return f"Evolved({self.winner or 'nothing better'}, holds={self.holds})"

    def _repr_html_(self) -> str:
        """Return the summary as HTML."""
        return f"<pre>{escape(str(self))}</pre>"

    def write(self, folder: str | Path) -> list[Path]:
        """Write candidates.csv, evolve.md and winner.yaml into a folder."""
        make_folder(Path(folder))
        return [Path(folder) / name for name in write_evolution(self.evolution, Path(folder))]


def summarize_evolution(found: Evolution) -> list[str]:
    """Return the whole summary as lines of text."""
    lines = [_head(found)]
    best = found.winner
    if not best.candidate.change:
        return [
            *lines,
            "No candidate is better than the engine's own scheduling policy (the baseline).",
            *_caveats(found),
        ]
    lines += ["", "Winner", *(f"  {line}" for line in _winner(found))]
    lines += ["", "Evaluation on held-out trials", *(f"  {line}" for line in _judged(found))]
    lines += ["", "Effect by request class", *(f"  {describe_cost(cost)}" for cost in found.costs)]
    if len(found.goals) > 1:
        lines += [
            "",
            "Best trade-offs (no candidate is better in every objective)",
            *(f"  {x}" for x in _front(found)),
        ]
    return [*lines, "", *_caveats(found)]


def _head(found: Evolution) -> str:
    goals = "; ".join(map(str, found.goals))
    trials = len(found.split.train)
    where = f"evaluated on {trials} {'trial' if trials == 1 else 'trials'}"
    if found.final:
        final = len(found.split.final)
        where += f", {len(found.final)} of them on {final} further trials in the final round"
    return f"{found.name}: {found.tried} {found.kind} {where}, for {goals}"


def _winner(found: Evolution) -> list[str]:
    best = found.winner
    lines = [*describe_candidate(best, found.policy_hooks), *_same_for_all(found)]
    losses = ", ".join(
        f"{goal.figure} {-loss:+.1%}" for goal, loss in zip(found.goals, best.loss, strict=True)
    )
    where = "final round" if found.final else "search trials"
    lines.append(f"{where}: gains {losses}; unserved {best.unserved:+.1%}")
    return lines


def _same_for_all(found: Evolution) -> list[str]:
    """Return notes on variables of the winning policy that have the same value for all requests."""
    sent = [
        request
        for trial in found.split.train
        for request in build_clients(trial.scenario.workload, trial.scenario.timeout).requests
    ]
    rule = dict(found.winner.candidate.change).get("engine.rule", "")
    looked_at = {x for one in parse_policy(rule, found.policy_hooks).values() for x in one.names}
    lines = []
    for name in sorted(looked_at & {"prompt_tokens", "priority"}):
        values = {getattr(request, name) for request in sent}
        if len(values) == 1:
            lines.append(
                f"{name} is {values.pop()} for all of these requests; a constant is equivalent"
            )
    return lines


def describe_candidate(one: CandidateScore, hooks: Sequence[PolicyHook]) -> list[str]:
    """Return lines of text that describe a candidate."""
    lines: list[str] = []
    for path, value in one.candidate.change:
        if path == "engine.rule":
            lines += describe_policy(str(value), tuple(hooks))
        elif isinstance(value, dict):
            lines.append(f"the scheduler in {value['file']} ({one.candidate.parts} lines)")
        else:
            lines.append(format_assignment(path, value))
    return lines


def describe_policy(rule: str, hooks: tuple[PolicyHook, ...]) -> list[str]:
    """Return lines of text for a policy: one line per hook (decision), and the meaning of the
    variables.
    """
    lines, used = [], dict[str, str]()
    known = {hook.name: hook for hook in hooks}
    for name, expression in parse_policy(rule, hooks).items():
        hook = known[name]
        lines.append(f"{name} = {expression.text}")
        lines.append(f"  {_of_seam(hook, expression.text, bool(expression.names))}")
        used |= {
            one: said
            for one, said in {**REQUEST_VARIABLES, **ENGINE_VARIABLES}.items()
            if one in expression.names
        }
    if used:
        lines.append("; ".join(f"{one}: {said}" for one, said in used.items()))
    left = [f"{hook.name} ({hook.default_rule})" for hook in hooks if f"{hook.name} =" not in rule]
    return [*lines, *([f"as shipped: {', '.join(left)}"] if left else [])]


def _of_seam(hook: PolicyHook, text: str, looks: bool) -> str:
    if looks:
        return hook.description
    if hook.sort in _CONSTANT:
        return f"{hook.description}: {_CONSTANT[hook.sort]}"
    if hook.sort == "tokens":
        return f"{hook.description}: {text}"
    yes = not text.startswith("-") and float(text) > 0
    return f"{hook.description}: {'always' if yes else 'never'}"


def _judged(found: Evolution) -> list[str]:
    lines = [line for judged in found.evaluations for line in describe_evaluation(judged)]
    if found.split.held_out is None:
        lines.append("the workload has no random part, so there are no held-out trials")
    else:
        lines.append(
            f"evaluated on {found.split.held_out}; brackets: 95 % interval of the mean gain"
        )
    missed = [judged.condition.description for judged in found.evaluations if not judged.holds]
    if missed:
        lines.append(f"The improvement does NOT hold: {', '.join(missed)}")
    elif found.split.held_out is None:
        lines.append(
            "The improvement holds under all conditions, but only on the requests that were "
            "used for the search"
        )
    else:
        lines.append("The improvement holds under all conditions")
    return lines


def describe_evaluation(judged: WinnerEvaluation) -> list[str]:
    """Return lines of text for one evaluation of the winner."""
    name = judged.condition.description
    if judged.why:
        return [f"{name}: cannot be run: {judged.why}"]
    gains = "; ".join(_gain(gain) for gain in judged.gains)
    before, after = judged.unserved
    fate = f"; unserved {before:.0f} -> {after:.0f}" if before or after else ""
    return [f"{name}: {gains}{fate}: {'holds' if judged.holds else 'does NOT hold'}"]


def _gain(gain: Improvement) -> str:
    said = _said(gain.goal.figure, gain.shipped), _said(gain.goal.figure, gain.evolved)
    wide = "" if gain.low is None else f" [{gain.low:+.1%}, {gain.high:+.1%}]"
    return f"{gain.goal.figure} {said[0]} -> {said[1]}, gain {gain.mean:+.1%}{wide}"


def _said(figure: str, value: float | None) -> str:
    if value is None:
        return "none"
    return METRICS[figure].format(value) if figure in METRICS else f"{value:.4g}"


def describe_cost(cost: RequestClassCost) -> str:
    """Return a line of text that describes the effect of the winner on one class of requests."""
    before, after = cost.before_s, cost.after_s
    parts = ["no request finished in both runs"]
    if before is not None and after is not None:
        parts = [f"mean E2E {before:.3g} s -> {after:.3g} s ({after - before:+.3g} s)"]
    parts += [
        f"{cost.faster} faster and {cost.slower} slower by more than 5 %",
    ]
    if cost.lost or cost.saved:
        parts.append(f"{cost.saved} newly served, {cost.lost} no longer served")
    return f"{cost.kind}: {cost.count} requests, {', '.join(parts)}"


def _front(found: Evolution) -> list[str]:
    lines = []
    for one in found.front:
        gains = ", ".join(
            f"{goal.figure} {-loss:+.1%}" for goal, loss in zip(found.goals, one.loss, strict=True)
        )
        said = "; ".join(re.sub(r"\s*\n\s*", "; ", str(value)) for _, value in one.candidate.change)
        lines.append(f"{gains}, unserved {one.unserved:+.1%}: {said or 'as shipped'}")
    return lines


def _caveats(found: Evolution) -> list[str]:
    lines = [*found.notes]
    if found.failed:
        lines.append(
            f"{found.failed} candidates could not be run; see candidates.csv for the reasons"
        )
    fate = (
        ""
        if found.has_outcome_goal
        else f"; 1 % more unserved requests count as a loss of {UNSERVED_WEIGHT:g} %"
    )
    length = f"each part of a policy counts as a loss of {PART_PENALTY:.2%}"
    return [*lines, f"Candidates are ranked by their mean gain over the baseline; {length}{fate}."]
