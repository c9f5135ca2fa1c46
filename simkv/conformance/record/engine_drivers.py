"""Registry of the engines whose released schedulers can be recorded."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
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
from simkv.conformance.record.recording_case import CaseSchema, RecordingCase
from simkv.native.native_engines import NATIVE_ENGINES
from simkv.native.sglang import sglang_stubs
from simkv.native.trtllm import trtllm_stubs
from simkv.native.vllm import vllm_stubs
from simkv.schedulers.sglang import versions as sglang_versions
from simkv.schedulers.vllm.versions import find_rules


@dataclass(frozen=True)
class EngineDriver:
    """Functions that record the released scheduler of an engine.

    Within the context ``stub_imports(folder)``, the scheduler of ``package`` is imported from
    ``folder``, and ``record(case, version, name)`` records a case. ``make_case(version, name)``
    builds a case. ``case_names(version, count)`` returns names of random cases, and
    ``handmade_names(version)`` returns names of handmade cases. ``form`` describes the structure of
    the cases.

    The rules of a version are compared with the rules of ``base_release(version)``. ``rules_of``
    returns the rules of a release; it is None if all versions have the same rules. ``seen`` returns
    the rules that recordings can show. For each setting in ``knobs``, some recordings that depend
    on the setting are stored as test data.
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


def interleave_kinds(names: Sequence[str]) -> list[str]:
    """Return the names of cases in an order in which the kinds of cases alternate.

    Each kind therefore occurs early.
    """
    turn: Counter[str] = Counter()
    order: dict[str, int] = {}
    for name in names:
        kind = name.split("-")[0]
        order[name] = turn[kind]
        turn[kind] += 1
    return sorted(names, key=order.__getitem__)


def prepare_case(driven: EngineDriver, version: str, name: str, folder: Path) -> RecordingCase:
    """Return a case, which is a workload for recording the decisions of a version.

    If the rules of the version are unknown, some settings have their defaults: the settings that
    its decision code in ``folder`` does not mention.
    """
    case: RecordingCase = driven.make_case(version, name)
    if driven.base_release(version) == version:
        return case
    known, kept = _mentioned(driven.package, folder), (*driven.form.kept, *driven.form.unnamed)
    config = case.config
    for one in fields(config) if known else ():
        absent = not {one.name, one.name.upper(), f"SGLANG_{one.name.upper()}"} & known
        if absent and one.name not in kept and one.default is not MISSING:
            with contextlib.suppress(ValueError):  # another setting requires it
                config = replace(config, **{one.name: one.default})
    return case._replace(config=config)


@lru_cache(maxsize=2)
def _mentioned(package: str, folder: Path) -> frozenset[str]:
    """Return the words in two groups of source files: files that make decisions, and files that
    declare options.

    Returns no words if the source declares no options.
    """
    spec = next(spec for spec in NATIVE_ENGINES.values() if spec.package == package)
    options = spec.options(folder).keys()
    texts = (path.read_text(encoding="utf-8") for path in spec.files(folder) if options)
    return frozenset(options | {word for text in texts for word in _WORD.findall(text)})


_WORD = re.compile(r"\w+")


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
        lambda _: [],
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
        lambda _: [],
        trtllm_cases.base_variant,
        lambda _: None,
        lambda _: [],
        trtllm_cases.SHOWN_KNOBS,
    ),
}
