"""The engines whose own schedulers can be driven, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkv.proof.conform.trace import DecisionTrace
from simkv.proof.record import cases, hollow, rules, sglang, sglang_cases, sglang_hollow, vllm
from simkv.schedulers.sglang import versions as sglang_versions
from simkv.schedulers.vllm.versions import rules_of


@dataclass(frozen=True)
class Driven:
    """How the scheduler of a version is driven.

    While ``hollowed(folder)`` lasts, ``record(case, version, name)`` records a case. Cases by name:
    ``case_of(version, name)``, of which ``names_of(version, count)`` are random and
    ``by_hand(version)`` are made. ``base_of`` a version is the release whose rules (``rules_of``)
    it is held against; the rules that its recordings can show are ``seen`` of it.
    """

    hollowed: Callable[[Path], AbstractContextManager[None]]
    record: Callable[[Any, str, str], DecisionTrace]
    case_of: Callable[[str, str], Any]
    names_of: Callable[[str, int], list[str]]
    by_hand: Callable[[str], list[str]]
    base_of: Callable[[str], str]
    rules_of: Callable[[str], Any]
    seen: Callable[[str], list[str]]


DRIVEN: Mapping[str, Driven] = {
    "vllm": Driven(
        hollow.hollowed,
        vllm.record,
        cases.case_of,
        cases.names_of,
        cases.by_hand,
        cases.base_of,
        rules_of,
        lambda version: [rule for rule in rules.SEEN if rules.can_show(version, rule)],
    ),
    "sglang": Driven(
        sglang_hollow.sglang_hollowed,
        sglang.record,
        sglang_cases.sglang_case,
        lambda _, count: [f"rand-{number:03}" for number in range(count)],
        lambda _: [],
        sglang_cases.base_of,
        sglang_versions.RULES.__getitem__,
        lambda base: list(sglang_versions.SEEN[base]),
    ),
}
