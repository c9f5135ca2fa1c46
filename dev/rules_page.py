"""Generate the pages of rules by release: ``python -m dev.rules_page docs``.

The pages list the rules that the engines declare with ``simkv.schedulers.rule_fields``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
    """A page about an engine: its title, the module with its rules, the rules of each variant, the
    releases that added settings, and lines that explain terms.
    """

    title: str
    spec: EngineSpec
    module: str
    rules: Mapping[str, Any]
    knobs: Mapping[str, str]
    terms: Sequence[str]


VLLM_TERMS = (
    "A *hit* is the part of a prompt that a request finds in the prefix cache. A *layer group* is",
    "a set of layers with their own block table. A step is *in flight* until its tokens are known.",
    "A block is *offered for storage* if vLLM tries to copy it to host memory. *Draft slots* are",
    "tokens of a step that are reserved for draft tokens. *Lookahead slots* are KV slots that are",
    "reserved for the drafter.",
)
SGLANG_TERMS = (
    "A *pass* is one attempt to form a prefill batch from the waiting queue. A *chunked prompt* is",
    "computed in several passes. While the *batch-full flag* is set, no request is admitted. A",
    "request is *retracted* if it loses its memory because running requests need more of it.",
)

PAGES = {
    "vllm-rules.md": RulesPage(
        "vLLM",
        VLLM,
        "simkv/schedulers/vllm/release_rules.py",
        VLLM_RULES,
        {knob: released.since for knob, released in RELEASED_KNOBS.items()},
        VLLM_TERMS,
    ),
    "sglang-rules.md": RulesPage(
        "SGLang", SGLANG, "simkv/schedulers/sglang/versions.py", SGLANG_RULES, {}, SGLANG_TERMS
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
        "differ without the rule. If a rule needs certain settings to have an effect, its entry",
        f"names them. `make rules` generates this page from `{page.module}`.",
        "",
        *page.terms,
        "",
        "## Releases",
        "",
        "This list compares each release with the release before it. The sections below describe",
        "the rules.",
        "",
    ]
    names = re.compile(rf"\b({'|'.join([*rules, *page.knobs])})\b")
    for name, variant in page.spec.variants.items():
        summary = names.sub(r"`\1`", variant.summary)
        lines.append(f"- **{name}**: {summary}.")
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
        yield f"  Without the rule, {_sentence(rule.otherwise[0].lower() + rule.otherwise[1:])}"
    if rule.values:
        for since, value in rule.values.items():
            yield f"  Since {since}: {', '.join(f'`{each}`' for each in value)}."
    yield f"  Source: {_sentence(rule.source)}"
    if shown := _shown(rule):
        yield f"  {shown}"


def _releases(rule: Rule) -> str:
    if rule.values:
        return "changed in " + ", ".join(rule.changes)
    if rule.since is None and rule.until is None:
        return "in no release"
    since = f"since {rule.since}" if rule.since else ""
    until = f"before {rule.until}" if rule.until else ""
    return ", ".join(part for part in (since, until) if part)


def _shown(rule: Rule) -> str:
    """Return which recordings can show a rule; empty if recordings with any settings can."""
    if not rule.can_be_shown:
        why = rule.hidden or "the rule applies only at start-up"
        return f"No recording shows this rule, because {why}."
    knobs = " and ".join(f"`{knob}`" for knob in rule.knobs)
    return f"Only recordings with {knobs} can show this rule." if knobs else ""


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def main(folder: Path) -> None:
    """Write the pages into FOLDER."""
    for name, page in PAGES.items():
        write_text(folder / name, render_page(page))


if __name__ == "__main__":
    typer.run(main)
