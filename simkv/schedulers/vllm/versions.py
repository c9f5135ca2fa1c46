"""Variants of vLLM by name: releases, and unreleased changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from simkv.core.scheduler_protocol import Variant
from simkv.schedulers.vllm.release_rules import FixedKnob, VllmRules
from simkv.schedulers.vllm.releases import (
    NOT_YET_AVAILABLE,
    PATCHED,
    RECORDED_PATCHES,
    RELEASES,
    UNAVAILABLE_REASONS,
)

#: Knobs that are not modelled together with an unreleased change.
_NOT_WITH = {
    "kv_cache_groups": FixedKnob(
        (0,),
        "{version} is modelled for one group of layers that attend to everything; leave it out",
    ),
    "num_speculative_tokens": FixedKnob(
        0, "{version} is not modelled with speculative decoding; leave it out"
    ),
    "eviction_policy": FixedKnob("lru", "{version} is not modelled with offloading; leave it out"),
    "secondary_tiers": FixedKnob((), "{version} is not modelled with offloading; leave it out"),
    **dict.fromkeys(
        ("kv_connector", "kv_role"),
        FixedKnob(None, "{version} is not modelled with KV from another replica; leave it out"),
    ),
}


def _minor(name: str) -> int:
    return int(name.split(".")[1])


def _number(name: str) -> tuple[int, ...]:
    """Return the parts of a version as a tuple that sorts in release order."""
    return tuple(map(int, name.split(".")))


def _rules(name: str) -> VllmRules:
    """Return the rules of a release, collected from all releases up to it."""
    if name in PATCHED:
        return replace(_rules(MINORS[f"0.{_minor(name)}"]), **PATCHED[name].rules)
    minor = _minor(name)
    rules, fixed = VllmRules(), dict[str, FixedKnob]()
    for number, release in RELEASES.items():
        if number <= minor:
            rules = replace(rules, **release.rules)
            fixed.update(release.without)
        else:
            for knob, value in release.knobs.items():
                fixed[knob] = FixedKnob(
                    value,
                    UNAVAILABLE_REASONS.get(knob, NOT_YET_AVAILABLE).format(since=f"0.{number}"),
                )
    return replace(rules, fixed=fixed)


#: The variant of each minor release, newest first.
MINORS = {
    f"0.{minor}": f"0.{minor}.{RELEASES[minor].patch}" for minor in sorted(RELEASES, reverse=True)
}
_NEWEST = max(RELEASES)
#: Variants that are releases, newest first: one for each minor release, and patch releases whose
#: rules differ from it.
RELEASED = sorted({*MINORS.values(), *PATCHED}, key=_number, reverse=True)
_LATEST = _rules(MINORS[f"0.{_NEWEST}"])

#: The rules of each variant: releases and unreleased changes.
RULES: Mapping[str, VllmRules] = {
    "0.33.0": _LATEST,
    "0.33.0-skip-blocked": replace(
        _LATEST,
        skip_blocked=True,
        fixed={
            **_LATEST.fixed,
            **_NOT_WITH,
            "num_cpu_blocks": FixedKnob(
                0, "{version} is not modelled with offloading; leave it out"
            ),
        },
    ),
    **{name: _rules(name) for name in RELEASED if _minor(name) < _NEWEST},
}


def _release(name: str) -> Variant:
    """Describe a release: its source, its changes, and the patch releases with the same rules."""
    minor = _minor(name)
    since = max(number for number in RELEASES if number <= minor and RELEASES[number].brought)
    what = f"since 0.{since}: {RELEASES[since].brought}"
    commit = RELEASES[minor].commit
    if name in PATCHED:
        what, commit = PATCHED[name].brought, PATCHED[name].commit
    if alike := [patch for patch, variant in RECORDED_PATCHES.items() if variant == name != patch]:
        what += f"; recorded as equal: {', '.join(alike)}"
    return Variant(f"vllm-project/vllm@{commit} ({name}, wheel), vllm/v1/core", what)


VARIANTS: Mapping[str, Variant] = {
    "0.33.0": Variant(
        "vllm-project/vllm@4ba787ec9 (0.33.0), vllm/v1/core/sched",
        "chunked prefill, decodes first; the whole sequence must fit when it is admitted",
    ),
    "0.33.0-skip-blocked": Variant(
        "0.33.0 with vllm-project/vllm#33499 (2026-02-01, open; also in #35852 and #36390)",
        "0.33.0; a waiting request for which there are no blocks does not stop those behind it",
    ),
    **{name: _release(name) for name in RELEASED if _minor(name) < _NEWEST},
}


def find_variant(name: str) -> str:
    """Return the variant whose rules a release has.

    A minor release (0.27) stands for its variant (0.27.0). A recorded patch release has the variant
    in ``RECORDED_PATCHES``; any other has the variant of the newest recorded patch before it.

    Raises ValueError for an unknown name.
    """
    if name in RULES:
        return name
    if name in RECORDED_PATCHES:
        return RECORDED_PATCHES[name]
    parts = name.split(".")
    if len(parts) in (2, 3) and parts[-1].isascii() and parts[-1].isdecimal():
        minor = ".".join(parts[:2])
        older = [
            known for known in RECORDED_PATCHES if known.startswith(f"{minor}.") and len(parts) > 2
        ]
        older = [known for known in older if _number(MINORS[minor]) < _number(known)]
        if newest := max((k for k in older if _number(k) < _number(name)), key=_number, default=""):
            return RECORDED_PATCHES[newest]
        if minor in MINORS:
            return MINORS[minor]
    others = ", ".join(name for name in RULES if "-" in name)
    raise ValueError(
        f"{name!r} is not known; expected a release of vLLM from 0.{min(RELEASES)} to "
        f"0.{_NEWEST} (such as 0.27, 0.27.0 or 0.27.1), or {others}"
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
        minors = "|".join(str(minor) for minor in RELEASES)
        names = [*RULES, *MINORS, *(patch for patch in RECORDED_PATCHES if patch.count(".") > 2)]
        patch = {"pattern": rf"^0\.({minors})\.[0-9]+$"}
        return {**handler(schema), "anyOf": [{"enum": [*dict.fromkeys(names)]}, patch]}


def find_equivalent_release(name: str) -> str:
    """Return the earliest release with the rules of ``name``; an unreleased change returns
    itself."""
    rules = find_rules(name)
    return [variant for variant, others in RULES.items() if others == rules][-1]


def unrecorded_note(name: str) -> str | None:
    """Return a note on which rules an unrecorded patch release uses; None if it was recorded."""
    variant = find_variant(name)
    if name.count(".") < 2 or name in (variant, *RECORDED_PATCHES):
        return None
    return f"vLLM {name} was not recorded: it goes by the rules of {variant}"
