"""Registry of the engines whose released schedulers can be recorded."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.conformance.decision_trace import DecisionTrace
from simkv.conformance.record import (
    sglang_cases,
    sglang_recorder,
    trtllm_cases,
    trtllm_recorder,
    vllm_cases,
    vllm_recorder,
)
from simkv.conformance.record.recording_case import CaseSchema, RecordingCase
from simkv.conformance.record.rule_inference import OBSERVABLE_RULES, can_show
from simkv.native.driver_protocol import NativeEngine
from simkv.native.sglang.sglang_driver import NATIVE_SGLANG
from simkv.native.trtllm.trtllm_driver import NATIVE_TRTLLM
from simkv.native.vllm.vllm_driver import NATIVE_VLLM
from simkv.schedulers.sglang.versions import RULES, RULES_SHOWN
from simkv.schedulers.vllm.versions import find_rules


@dataclass(frozen=True)
class EngineDriver:
    """Functions that record the released scheduler of an engine.

    ``record`` records a case with the code of ``native``, ``make_case`` builds a case, and
    ``case_names`` returns the names of random cases. ``form`` describes the settings of the cases.
    ``rules_of`` returns the rules of a release, or is None if all versions have equal rules.
    ``seen`` returns the rules that recordings can show.
    """

    native: NativeEngine
    form: CaseSchema
    record: Callable[[Any, str, str], DecisionTrace]
    make_case: Callable[[str, str], RecordingCase]
    case_names: Callable[[str, int], list[str]]
    rules_of: Callable[[str], Any]
    seen: Callable[[str], list[str]]


def interleave_kinds(names: Sequence[str]) -> list[str]:
    """Return the names of cases in an order in which the kinds of cases alternate."""
    turn: Counter[str] = Counter()
    order: dict[str, int] = {}
    for name in names:
        kind = name.split("-")[0]
        order[name] = turn[kind]
        turn[kind] += 1
    return sorted(names, key=order.__getitem__)


def prepare_case(driven: EngineDriver, version: str, name: str, folder: Path) -> RecordingCase:
    """Return a workload for recording the decisions of a version.

    If the rules of the version are unknown, settings that its code in ``folder`` does not mention
    have their defaults.
    """
    case = driven.make_case(version, name)
    if driven.native.variant_of(version) == version:
        return case
    known, kept = _mentioned(driven.native, folder), (*driven.form.kept, *driven.form.unnamed)
    config = case.config
    for one in fields(config) if known else ():
        absent = not {one.name, one.name.upper(), f"SGLANG_{one.name.upper()}"} & known
        if absent and one.name not in kept and one.default is not MISSING:
            with contextlib.suppress(ValueError):  # another setting requires it
                config = replace(config, **{one.name: one.default})
    return case._replace(config=config)


@lru_cache(maxsize=2)
def _mentioned(spec: NativeEngine, folder: Path) -> frozenset[str]:
    """Return the words in the files of a source that decide or declare options.

    Returns no words if the source declares no options.
    """
    options = spec.options(folder).keys()
    texts = (path.read_text(encoding="utf-8") for path in spec.files(folder) if options)
    return frozenset(options | {word for text in texts for word in _WORD.findall(text)})


_WORD = re.compile(r"\w+")


ENGINE_DRIVERS: Mapping[str, EngineDriver] = {
    "vllm": EngineDriver(
        NATIVE_VLLM,
        vllm_cases.CASE_SCHEMA,
        vllm_recorder.record,
        vllm_cases.make_case,
        vllm_cases.case_names,
        find_rules,
        lambda version: [rule for rule in OBSERVABLE_RULES["vllm"] if can_show(version, rule)],
    ),
    "sglang": EngineDriver(
        NATIVE_SGLANG,
        sglang_cases.CASE_SCHEMA,
        sglang_recorder.record,
        sglang_cases.make_case,
        sglang_cases.case_names,
        RULES.__getitem__,
        lambda base: list(RULES_SHOWN[base]),
    ),
    "trtllm": EngineDriver(
        NATIVE_TRTLLM,
        trtllm_cases.CASE_SCHEMA,
        trtllm_recorder.record,
        trtllm_cases.make_case,
        trtllm_cases.case_names,
        lambda _: None,
        lambda _: [],
    ),
}
