"""Registry of the engines whose released schedulers can be recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkv.conformance.decision_trace import DecisionTrace
from simkv.conformance.record import (
    rule_inference,
    sglang_cases,
    sglang_recorder,
    trtllm_cases,
    trtllm_recorder,
    vllm_cases,
    vllm_recorder,
)
from simkv.conformance.record.recording_case import CaseSchema
from simkv.native.sglang import sglang_stubs
from simkv.native.trtllm import trtllm_stubs
from simkv.native.vllm import vllm_stubs
from simkv.schedulers.sglang import versions as sglang_versions
from simkv.schedulers.vllm.versions import find_rules


@dataclass(frozen=True)
class EngineDriver:
    """Functions that record the released scheduler of an engine.

    Within ``stub_imports(folder)``, the scheduler of ``package`` is imported from ``folder``, and
    ``record(case, version, name)`` records a case. ``make_case(version, name)`` builds a case.
    ``case_names(version, count)`` returns names of random cases, ``handmade_names(version)`` names
    of handmade cases. ``form`` describes the structure of the cases.

    The rules of a version are compared with the rules of ``base_release(version)``. ``rules_of``
    returns the rules of a release; it is None if all versions have the same rules. ``seen`` returns
    the rules that recordings can reveal. ``knobs`` are settings; recordings that depend on them are
    kept.
    """

    title: str
    package: str
    form: CaseSchema
    stub_imports: Callable[[Path], AbstractContextManager[None]]
    record: Callable[[Any, str, str], DecisionTrace]
    make_case: Callable[[str, str], Any]
    case_names: Callable[[str, int], list[str]]
    handmade_names: Callable[[str], list[str]]
    base_release: Callable[[str], str]
    rules_of: Callable[[str], Any]
    seen: Callable[[str], list[str]]
    knobs: tuple[str, ...] = ()


ENGINE_DRIVERS: Mapping[str, EngineDriver] = {
    "vllm": EngineDriver(
        "vLLM",
        "vllm",
        vllm_cases.CASE_SCHEMA,
        vllm_stubs.stub_vllm_imports,
        vllm_recorder.record,
        vllm_cases.make_case,
        vllm_cases.case_names,
        vllm_cases.handmade_names,
        vllm_cases.base_release,
        find_rules,
        lambda version: [
            rule
            for rule in rule_inference.OBSERVABLE_RULES["vllm"]
            if rule_inference.can_show(version, rule)
        ],
    ),
    "sglang": EngineDriver(
        "SGLang",
        "sglang",
        sglang_cases.CASE_SCHEMA,
        sglang_stubs.stub_sglang_imports,
        sglang_recorder.record,
        sglang_cases.make_case,
        sglang_cases.case_names,
        lambda version: sglang_cases.RARE.get(version, []),
        sglang_cases.base_release,
        sglang_versions.RULES.__getitem__,
        lambda base: list(sglang_versions.RULES_SHOWN[base]),
        sglang_cases.SHOWN_KNOBS,
    ),
    "trtllm": EngineDriver(
        "TensorRT-LLM",
        "tensorrt_llm",
        trtllm_cases.CASE_SCHEMA,
        trtllm_stubs.stub_trtllm_imports,
        trtllm_recorder.record,
        trtllm_cases.make_case,
        trtllm_cases.case_names,
        lambda version: trtllm_cases.RARE.get(version, []),
        trtllm_cases.base_variant,
        lambda _: None,
        lambda _: [],
        trtllm_cases.SHOWN_KNOBS,
    ),
}
