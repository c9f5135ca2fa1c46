"""Generate the pages of rules by release: ``python -m dev.rules_page docs``.

The pages list the rules that the engines declare with ``simkv.schedulers.rule_fields``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer

from simkv.core.atomic_files import write_text
from simkv.core.engine_spec import EngineSpec
from simkv.schedulers.rule_fields import Rule, described_rules
from simkv.schedulers.sglang.spec import SGLANG
from simkv.schedulers.sglang.versions import RULES as SGLANG_RULES
from simkv.schedulers.vllm.release_knobs import RELEASED_KNOBS
from simkv.schedulers.vllm.spec import VLLM
from simkv.schedulers.vllm.versions import RULES as VLLM_RULES


class RulesPage(NamedTuple):
    """A page: the engine with its title, the file with its rules, and the rules of each variant."""

    title: str
    spec: EngineSpec
    module: str
    rules: Mapping[str, Any]
    knobs: Mapping[str, str]


PAGES = {
    "vllm-rules.md": RulesPage(
        "vLLM",
        VLLM,
        "simkv/schedulers/vllm/release_rules.py",
        VLLM_RULES,
        {knob: released.since for knob, released in RELEASED_KNOBS.items()},
    ),
    "sglang-rules.md": RulesPage(
        "SGLang", SGLANG, "simkv/schedulers/sglang/versions.py", SGLANG_RULES, {}
    ),
}


def render_page(page: RulesPage) -> str:
    """Return a page: the changes of each release, then the rules by topic."""
    rules = described_rules(next(iter(page.rules.values())))
    lines = [
        f"# Rules of {page.title} by release",
        "",
        "This page lists the scheduling rules that changed between releases. All other rules are",
        "the same in all modelled releases. A *recording* contains the decisions of the engine's",
        "own scheduler in a test case. A recording shows a rule if some of its decisions would",
        f"differ without the rule. `make rules` generates this page from `{page.module}`.",
        "",
        "## Releases",
        "",
    ]
    lines += [f"- **{name}**: {variant.summary}." for name, variant in page.spec.variants.items()]
    for topic in dict.fromkeys(rule.topic for rule in rules.values()):
        lines += ["", f"## {topic}", ""]
        for name, rule in rules.items():
            if rule.topic == topic:
                lines += _describe(name, rule)
    if page.knobs:
        lines += ["", "## Settings", "", "| setting | since |", "| --- | --- |"]
        lines += [f"| `{knob}` | {since} |" for knob, since in page.knobs.items()]
    return "\n".join([*lines, ""])


def _describe(name: str, rule: Rule) -> Iterator[str]:
    """Yield a list item: the releases in which a rule applies, its meaning, its source, and the
    recordings that show it.
    """
    yield f"- **`{name}`** ({_releases(rule)}). {_sentence(rule.meaning)}"
    if rule.otherwise:
        yield f"  Otherwise: {_sentence(rule.otherwise[0].lower() + rule.otherwise[1:])}"
    if rule.values:
        values = (f"{', '.join(value)} since {since}" for since, value in rule.values.items())
        yield f"  Values: {'; '.join(values)}."
    yield f"  Source: {_sentence(rule.source)} {_shown(rule)}"


def _releases(rule: Rule) -> str:
    if rule.values:
        return "changed in " + ", ".join(rule.changes)
    if rule.since is None and rule.until is None:
        return "in no release"
    since = f"since {rule.since}" if rule.since else ""
    until = f"before {rule.until}" if rule.until else ""
    return ", ".join(part for part in (since, until) if part)


def _shown(rule: Rule) -> str:
    if not rule.can_be_shown:
        return f"No recording shows it: {rule.hidden or 'it applies at start-up'}."
    knobs = " and ".join(f"`{knob}`" for knob in rule.knobs)
    return (
        f"Recordings with {knobs} can show it." if knobs else "Recordings of any kind can show it."
    )


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def main(folder: Path) -> None:
    """Write the pages into FOLDER."""
    for name, page in PAGES.items():
        write_text(folder / name, render_page(page))


if __name__ == "__main__":
    typer.run(main)
