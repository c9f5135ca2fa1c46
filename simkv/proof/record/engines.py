"""The engines whose own schedulers can be driven, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkv.proof.conform.trace import DecisionTrace
from simkv.proof.record import (
    cases,
    hollow,
    rules,
    sglang,
    sglang_cases,
    sglang_hollow,
    trtllm,
    trtllm_cases,
    trtllm_stand_ins,
    vllm,
)
from simkv.proof.record.case import CaseForm
from simkv.schedulers.sglang import versions as sglang_versions
from simkv.schedulers.vllm.versions import rules_of


@dataclass(frozen=True)
class Driven:
    """How the scheduler of a version of an engine (by its ``title``) is driven.

    Its sources are those of the ``package``. While ``hollowed(folder)`` lasts, ``record(case,
    version, name)`` records a case. Cases by name: ``case_of(version, name)``, of which
    ``names_of(version, count)`` are random and ``by_hand(version)`` are made. ``base_of`` a version
    is the release whose rules (``rules_of``) it is held against, None where versions differ in
    none; the rules that its recordings can show are ``seen`` of it, and the ``knobs`` that some of
    them are kept for. Cases are of the ``form``.
    """

    title: str
    package: str
    form: CaseForm
    hollowed: Callable[[Path], AbstractContextManager[None]]
    record: Callable[[Any, str, str], DecisionTrace]
    case_of: Callable[[str, str], Any]
    names_of: Callable[[str, int], list[str]]
    by_hand: Callable[[str], list[str]]
    base_of: Callable[[str], str]
    rules_of: Callable[[str], Any]
    seen: Callable[[str], list[str]]
    knobs: tuple[str, ...] = ()


DRIVEN: Mapping[str, Driven] = {
    "vllm": Driven(
        "vLLM",
        "vllm",
        cases.FORM,
        hollow.hollowed,
        vllm.record,
        cases.case_of,
        cases.names_of,
        cases.by_hand,
        cases.base_of,
        rules_of,
        lambda version: [rule for rule in rules.SEEN["vllm"] if rules.can_show(version, rule)],
    ),
    "sglang": Driven(
        "SGLang",
        "sglang",
        sglang_cases.FORM,
        sglang_hollow.sglang_hollowed,
        sglang.record,
        sglang_cases.sglang_case,
        sglang_cases.names_of,
        lambda version: sglang_cases.RARE.get(version, []),
        sglang_cases.base_of,
        sglang_versions.RULES.__getitem__,
        lambda base: list(sglang_versions.SEEN[base]),
        sglang_cases.SHOWN_KNOBS,
    ),
    "trtllm": Driven(
        "TensorRT-LLM",
        "tensorrt_llm",
        trtllm_cases.FORM,
        trtllm_stand_ins.trtllm_hollowed,
        trtllm.record,
        trtllm_cases.trtllm_case,
        trtllm_cases.names_of,
        lambda version: trtllm_cases.RARE.get(version, []),
        trtllm_cases.variant_of,
        lambda _: None,
        lambda _: [],
        trtllm_cases.SHOWN_KNOBS,
    ),
}
