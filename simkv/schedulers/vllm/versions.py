"""Variants of vLLM by name: releases, and unreleased changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from simkv.core.engine_version import parse_version, plain_release
from simkv.core.scheduler_protocol import Variant
from simkv.schedulers.rule_fields import describe_changes, rules_in
from simkv.schedulers.vllm.release_knobs import fixed_knobs
from simkv.schedulers.vllm.release_rules import NEWEST, RELEASES, FixedKnob, VllmRules


class Proposal(NamedTuple):
    """A release with an unreleased change.

    - ``rules``: rules that the change sets.
    - ``fixed``: settings that are not modelled together with the change.
    """

    base: str
    rules: Mapping[str, Any]
    fixed: Mapping[str, FixedKnob]
    variant: Variant


_WITHOUT_OFFLOADING = "{version} is not modelled with offloading; remove it"

PROPOSALS: Mapping[str, Proposal] = {
    "0.33.0-skip-blocked": Proposal(
        "0.33.0",
        {"skip_blocked": True},
        {
            "kv_cache_groups": FixedKnob(
                (0,), "{version} is modelled only for models with full attention; remove it"
            ),
            "num_speculative_tokens": FixedKnob(
                0, "{version} is not modelled with speculative decoding; remove it"
            ),
            "num_cpu_blocks": FixedKnob(0, _WITHOUT_OFFLOADING),
            "eviction_policy": FixedKnob("lru", _WITHOUT_OFFLOADING),
            "secondary_tiers": FixedKnob((), _WITHOUT_OFFLOADING),
            **dict.fromkeys(
                ("kv_connector", "kv_role"),
                FixedKnob(
                    None, "{version} is not modelled with KV from another replica; remove it"
                ),
            ),
        },
        Variant(
            "0.33.0 with vllm-project/vllm#33499 (2026-02-01, open; also in #35852 and #36390)",
            "like 0.33.0, but a waiting request that lacks free blocks does not block later ones",
        ),
    )
}


def _minor(name: str) -> str:
    """Return the minor release of a version, such as 0.27."""
    version = parse_version(name)
    return f"{version.major}.{version.minor}"


def _rules(name: str) -> VllmRules:
    return replace(rules_in(VllmRules, name), fixed=fixed_knobs(name))


def _propose(proposal: Proposal) -> VllmRules:
    rules = _rules(proposal.base)
    fixed = {**rules.fixed, **proposal.fixed}
    return replace(rules, fixed=fixed, **proposal.rules)


#: Variants that are releases, newest first.
RELEASED = list(RELEASES)[::-1]
#: The variant of each minor release, newest first.
MINORS = {_minor(name): name for name in RELEASED if RELEASES[name].stands_for_minor}
#: Variant that reproduces all random test cases of each recorded release, oldest release first.
RECORDED: Mapping[str, str] = {
    recorded: name
    for name, release in RELEASES.items()
    for recorded in sorted((name, *release.alike), key=parse_version)
}

#: Rules of each variant; a variant is a release or an unreleased change.
RULES: Mapping[str, VllmRules] = {
    NEWEST: _rules(NEWEST),
    **{name: _propose(proposal) for name, proposal in PROPOSALS.items()},
    **{name: _rules(name) for name in RELEASED[1:]},
}


def _changes(name: str) -> str:
    """Describe the rules and knobs that a release changes, compared with the release before it."""
    older = RELEASED[RELEASED.index(name) + 1 :]
    if not older:
        return "the oldest modelled release"
    rules, before = RULES[name], RULES[older[0]]
    knobs = ", ".join(knob for knob in before.fixed if knob not in rules.fixed)
    parts = [describe_changes(rules, before), f"new settings: {knobs}" if knobs else ""]
    return "; ".join(filter(None, parts)) or f"same rules as {older[0]}"


def _release(name: str) -> Variant:
    """Describe a release: its source, its changes, and the patch releases with the same rules."""
    commit, alike, _ = RELEASES[name]
    summary = _changes(name)
    if alike:
        summary += f"; same rules in {', '.join(alike)}"
    return Variant(f"vllm-project/vllm@{commit} ({name}, wheel), vllm/v1/core", summary)


VARIANTS: Mapping[str, Variant] = {
    name: PROPOSALS[name].variant if name in PROPOSALS else _release(name) for name in RULES
}


@lru_cache(maxsize=1024)
def find_variant(name: str) -> str:
    """Return the variant that simulates a release of vLLM.

    An unrecorded patch release has the variant of the newest recorded release before it. Raises
    ValueError for an unknown name.
    """
    # A minor release (0.27) means its variant (0.27.0). A recorded patch release has its variant in
    # ``RECORDED``. A leading ``v``, a post release and a local version (0.11.0+cu128) are accepted.
    if name in RULES:
        return name
    if (release := plain_release(name)) is not None:
        if release in RECORDED:
            return RECORDED[release]
        if release in MINORS:
            return MINORS[release]
        version = parse_version(release)
        older = [
            known
            for known in RECORDED
            if _minor(known) == _minor(release) and parse_version(known) <= version
        ]
        if older and release.count(".") == 2:
            return RECORDED[max(older, key=parse_version)]
    raise ValueError(
        f"unknown version {name!r}; expected a release of vLLM from {[*MINORS][-1]} to "
        f"{next(iter(MINORS))} (such as 0.27, 0.27.0 or v0.27.1), or {', '.join(PROPOSALS)}"
    )


def find_rules(name: str) -> VllmRules:
    """Return the rules of a variant or release."""
    return RULES[find_variant(name)]


class ReleaseNames:
    """Pydantic annotation that validates a ``variant`` and lists its values in the JSON schema."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        def known(name: str) -> str:
            find_variant(name)
            return name

        check = {"type": "no-info", "function": known}
        return {"type": "function-after", "function": check, "schema": handler(source)}

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> Any:
        minors = "|".join(minor.replace(".", r"\.") for minor in reversed(MINORS))
        names = [*RULES, *MINORS, *(name for name in RECORDED if name.count(".") > 2)]
        patch = {"pattern": rf"^v?({minors})(\.[0-9]+)?(\.post[0-9]+)?(\+[0-9a-z.]+)?$"}
        return {**handler(schema), "anyOf": [{"enum": [*dict.fromkeys(names)]}, patch]}


def find_equivalent_release(name: str) -> str:
    """Return the earliest release with the same rules."""
    # For an unreleased change, the result is ``name``.
    rules = find_rules(name)
    return [variant for variant, others in RULES.items() if others == rules][-1]


def unrecorded_note(name: str) -> str | None:
    """Return a note on the rules that simulate an unrecorded patch release.

    Returns None for a recorded release.
    """
    variant = find_variant(name)
    release = plain_release(name)
    if release is None or release in MINORS or (release in RECORDED and ".post" not in name):
        return None
    return f"vLLM {name} was not recorded; simulated with the rules of {variant}"
