"""Which flag of the engine would have mended it: what-if over what its operator can really turn.

Single rules of a scheduler cannot be turned, and a setting that is no flag neither. Of changes that
do about as well the one comes first that takes back what somebody had set: then a switch, then a
number, then another version; a larger cache, which costs hardware, comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from simkv.core.errors import InputError
from simkv.core.told import told
from simkv.scenario.scenario import Scenario
from simkv.schedulers.registry import spec_of
from simkv.search.fields import with_knobs
from simkv.search.jobs import Job
from simkv.search.whatif.changes import Change
from simkv.search.whatif.evaluate import Evaluator, Figures, trial
from simkv.search.whatif.whatif import Effect, whatif

#: Those that come so near to the best in E2E do about as well.
NEAR = 1.1
Means = Literal["flag", "version", "memory"]


@dataclass(frozen=True)
class Remedy:
    """A change that helps: the ``flag`` as it is typed, or the version to take."""

    effect: Effect
    means: Means
    typed: str
    to_default: bool


@dataclass(frozen=True)
class Mending:
    """The run as it was, what would have helped, the best first, and how many were tried."""

    base: Figures
    remedies: tuple[Remedy, ...]
    tried: int

    def of(self, means: Means) -> list[Remedy]:
        """The remedies of one kind."""
        return [remedy for remedy in self.remedies if remedy.means == means]


def mend(
    scenario: Scenario, evaluator: Evaluator, tell: Callable[[str], None] = lambda _: None
) -> Mending:
    """Try every flag, and rank those that fix or help."""
    found = whatif(scenario, evaluator, tell=tell, also=_to_defaults(scenario, evaluator.folder))
    possible = [r for effect in found.effects if (r := _remedy(scenario, effect)) is not None]
    helpful = [r for r in possible if r.effect.judgement in ("fixes", "helps")]
    return Mending(found.base, tuple(_ranked(helpful)), len(possible))


def _to_defaults(scenario: Scenario, folder: Path) -> Iterator[tuple[Change, Job]]:
    """Every setting that somebody changed as the engine has it by itself; sizes stay."""
    spec = spec_of(scenario.engine)
    for one in fields(spec.config):
        value = getattr(scenario.engine, one.name)
        kept = one.name in ("name", "variant", spec.memory, spec.longest, spec.block)
        if kept or one.default is None or value == one.default:  # None is what its toggle says
            continue
        try:
            changed = with_knobs(scenario, folder, **{one.name: one.default})
            yield Change("knob", one.name, value, one.default), trial(changed, folder)
        except InputError:
            continue


def _remedy(scenario: Scenario, effect: Effect) -> Remedy | None:
    """The change as an operator would make it; None if he cannot."""
    change, spec = effect.change, spec_of(scenario.engine)
    if change.kind == "rule":
        return None
    if change.kind == "variant":
        return Remedy(effect, "version", f"{spec.name} {change.after}", False)
    source = told(spec.config)[change.field].source
    flag = source.split(",")[0].strip()
    if not (flag.startswith("--") or flag.isupper()):
        return None
    default = next(one.default for one in fields(spec.config) if one.name == change.field)
    means: Means = "memory" if change.kind == "memory" else "flag"
    typed = _typed(flag, change.after, spec.name)
    return Remedy(effect, means, typed, change.after == default)


def _typed(flag: str, value: Any, engine: str) -> str:
    if flag.isupper():
        return f"{flag}={value}"
    if value is True:
        return flag
    if value is False:
        return f"--no-{flag.removeprefix('--')}" if engine == "vllm" else f"without {flag}"
    return f"{flag} {'(left out)' if value is None else value}"


def _ranked(remedies: list[Remedy]) -> list[Remedy]:
    """By requests finished and judgement; of those near the best E2E the plainest first."""
    groups: dict[tuple[float, bool, bool], list[Remedy]] = {}
    for remedy in remedies:
        effect = remedy.effect
        group = (
            -effect.figures["finished"],
            effect.judgement != "fixes",
            remedy.means == "memory",
        )
        groups.setdefault(group, []).append(remedy)
    return [remedy for group in sorted(groups) for remedy in _by_e2e(groups[group])]


def _by_e2e(remedies: list[Remedy]) -> list[Remedy]:
    """What comes near to the shortest E2E by plainness, then all others by E2E."""
    shortest = min(remedy.effect.figures["e2e_ms.mean"] for remedy in remedies)

    def rank(remedy: Remedy) -> tuple[Any, ...]:
        effect = remedy.effect
        took = effect.figures["e2e_ms.mean"]
        plain = (
            not remedy.to_default,
            ("flag", "version", "memory").index(remedy.means),
            not isinstance(effect.change.after, bool | str),
            len(effect.slower) + len(effect.newly_failed),
            took,
        )
        return (0, *plain) if took <= NEAR * shortest else (1, took, *plain)

    return sorted(remedies, key=rank)
