"""Registry of the engines whose released schedulers can be recorded."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
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
from simkv.conformance.record.recording_case import CaseSchema, RecordingCase, default_settings
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

    ``rules_of`` returns the rules of a release, and ``seen`` the rules that recordings can show.
    """

    native: NativeEngine
    form: CaseSchema
    record: Callable[[Any, str, str], DecisionTrace]
    rules_of: Callable[[str], Any] = lambda _: None
    seen: Callable[[str], list[str]] = lambda _: []


def interleave_kinds(names: Sequence[str]) -> list[str]:
    """Return the names of cases in an order in which the kinds of cases alternate."""
    turn: Counter[str] = Counter()

    def place(name: str) -> int:
        turn[name.split("-")[0]] += 1
        return turn[name.split("-")[0]]

    return sorted(names, key=place)


def prepare_case(driven: EngineDriver, version: str, name: str, folder: Path) -> RecordingCase:
    """Build a case; settings that a source of unknown rules does not mention are unset."""
    case = driven.form.make(version, name)
    if driven.native.variant_of(version) == version:
        return case
    known, kept = _mentioned(driven.native, folder), (*driven.form.kept, *driven.form.unnamed)
    config = case.config
    for knob, default in default_settings(config).items() if known else ():
        absent = not {knob, knob.upper(), f"SGLANG_{knob.upper()}"} & known
        if absent and knob not in kept and default is not MISSING:
            with contextlib.suppress(ValueError):  # another setting requires it
                config = replace(config, **{knob: default})
    return case._replace(config=config)


@lru_cache(maxsize=2)
def _mentioned(spec: NativeEngine, folder: Path) -> frozenset[str]:
    """Return the words in the deciding files and the options; none if it declares no options."""
    options = spec.options(folder).keys()
    texts = (path.read_text(encoding="utf-8") for path in spec.files(folder) if options)
    return frozenset(options | {word for text in texts for word in re.findall(r"\w+", text)})


ENGINE_DRIVERS: Mapping[str, EngineDriver] = {
    "vllm": EngineDriver(
        NATIVE_VLLM,
        vllm_cases.CASE_SCHEMA,
        vllm_recorder.record,
        find_rules,
        lambda version: [rule for rule in OBSERVABLE_RULES["vllm"] if can_show(version, rule)],
    ),
    "sglang": EngineDriver(
        NATIVE_SGLANG,
        sglang_cases.CASE_SCHEMA,
        sglang_recorder.record,
        RULES.__getitem__,
        lambda base: list(RULES_SHOWN[base]),
    ),
    "trtllm": EngineDriver(NATIVE_TRTLLM, trtllm_cases.CASE_SCHEMA, trtllm_recorder.record),
}
