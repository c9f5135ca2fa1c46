"""Export a custom vLLM policy as a class for vLLM's ``--scheduler-cls``.

The generated file contains the source of the policy, stubs for its imports from simkv, and a
scheduler class that calls the policy before each step. ``check_export`` runs this class with the
scheduler of a released vLLM package on random small workloads and compares every decision with the
simulated one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from simkv.conformance.decision_replay import Mismatch, compare, replay_decisions
from simkv.conformance.decision_trace import DecisionTrace
from simkv.conformance.record.vllm_cases import make_case
from simkv.conformance.record.vllm_recorder import record
from simkv.conformance.vllm_policy_code import policy_spec, render_policy_class
from simkv.core.engine_spec import EngineSpec
from simkv.core.errors import InputError
from simkv.native.vllm.vllm_stubs import stub_vllm_imports
from simkv.scenario.custom import code_source as sources
from simkv.scenario.custom.code_source import CustomCode, override_trust
from simkv.scenario.custom.custom_engine import build_custom_spec
from simkv.scenario.custom.old_names import OLD_NAMES
from simkv.scenario.custom.vllm_policy import CustomVllmConfig, CustomVllmScheduler
from simkv.schedulers.vllm.release_rules import NEWEST
from simkv.schedulers.vllm.spec import VLLM

#: vLLM release of the generated class.
TARGET_RELEASE = NEWEST

#: Names of the classes that the generated file defines before the policy.
_STUBS = {"PolicyRequest", "CustomVllmConfig", "CustomVllmScheduler"}
_TOP = '''"""{title}

A scheduling policy for vLLM {release}, exported by simkv from {file} (SHA-256 {digest}):

    vllm serve MODEL --scheduler-cls {module}.{rule}Scheduler

{rule}SyncScheduler is the same without asynchronous scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class PolicyRequest(NamedTuple):
    """A request as the policy sees it: sizes in tokens, arrival in seconds."""

    prompt_tokens: int
    max_tokens: int
    emitted: int
    computed: int
    preemptions: int
    priority: int
    arrival: float


@dataclass(frozen=True)
class CustomVllmConfig:
    """Base class of the policy's settings."""


class CustomVllmScheduler:
    """Decisions of vLLM without a policy."""

    def __init__(self, config):
        self.config = config

    def waiting_order(self, r):
        return 0

    def running_order(self, r):
        return 0

    def most_running(self, waiting, running):
        return None

    def chunk(self, waiting, running):
        return None


# The policy.

{aliases}'''
_END = '''

# Connection to vLLM.

CONFIG = {config}


def _view(request):
    return PolicyRequest(
        request.num_prompt_tokens,
        request.max_tokens,
        request.num_output_tokens,
        request.num_computed_tokens,
        request.num_preemptions,
        request.priority,
        request.arrival_time,
    )


class _Asks:
    """Sorts the queues and sets the limits before vLLM schedules each step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._rule = {rule}(CONFIG)
        self._most = self.max_num_active_reqs
        self._chunk = self.scheduler_config.long_prefill_token_threshold

    def schedule(self, *args, **kwargs):
        rule = self._rule
        ordered = sorted(self.waiting, key=lambda request: rule.waiting_order(_view(request)))
        self.waiting.clear()
        self.waiting.extend(ordered)
        self.running.sort(key=lambda request: rule.running_order(_view(request)))
        views = list(map(_view, self.waiting)), list(map(_view, self.running))
        most, chunk = rule.most_running(*views), rule.chunk(*views)
        self.max_num_active_reqs = self._most if most is None else min(most, self._most)
        limit = self._chunk if chunk is None else min(max(chunk, 0), self.max_model_len)
        self.scheduler_config.long_prefill_token_threshold = limit
        return super().schedule(*args, **kwargs)


class {rule}Scheduler(_Asks, AsyncScheduler):
    """{title}"""


class {rule}SyncScheduler(_Asks, Scheduler):
    """{title}"""
'''


def load_policy(file: Path) -> tuple[EngineSpec, Any, CustomCode]:
    """Execute a policy file; return the engine with this policy, the class of the policy and its
    source code.

    Raises InputError if the file contains no policy for vLLM.
    """
    with override_trust(True):
        spec = build_custom_spec(file.stem, file.name, file.parent)
        of, source = sources.load_from_file(file, file.stem)
    if not (issubclass(of, CustomVllmScheduler) and issubclass(spec.config, CustomVllmConfig)):
        raise InputError(
            f"{file}: {of.__name__} must be a CustomVllmScheduler with a CustomVllmConfig; "
            "policies for mistral.rs, SGLang and FastDeploy can only be simulated"
        )
    return spec, of, source


def export_policy(file: Path, knobs: dict[str, Any], module: str) -> str:
    """Return the source of a Python module with the scheduler class for vLLM.

    ``knobs`` are settings of the policy. ``module`` is the name under which vLLM imports the file.
    Raises InputError if the file contains no policy or a setting is unknown.
    """
    if _is_scenario(file):
        if knobs:
            raise InputError(
                f"--set {min(knobs)}: this policy is written as expressions, which have no "
                "settings; remove --set"
            )
        return render_policy_class(file, TARGET_RELEASE, module)
    spec, of, source = load_policy(file)
    vllms = {field.name for field in fields(CustomVllmConfig)} | {"file"}
    own = {f.name for f in fields(spec.config)} - vllms
    if unknown := knobs.keys() - own:
        raise InputError(
            f"--set {sorted(unknown)[0]}: unknown setting of the policy; expected one of "
            f"{', '.join(sorted(own)) or 'none'}"
        )
    given = asdict(spec.config(**knobs))
    values = ", ".join(f"{name}={given[name]!r}" for name in sorted(own))
    code = source.code.decode()
    knobs_class = spec.config.__mro__[1].__name__
    parts = {
        "title": (of.__doc__ or of.__name__).strip().splitlines()[0],
        "release": TARGET_RELEASE,
        "file": file.name,
        "digest": source.digest,
        "module": module,
        "rule": of.__name__,
        "config": f"{_name(knobs_class)}({values})",
        "aliases": "".join(f"{old} = {new}\n" for old, new in _aliases(code)),
    }
    return _TOP.format(**parts) + _without_imports(code) + _END.format(**parts)


def _aliases(text: str) -> Iterator[tuple[str, str]]:
    """Yield pairs (old, new) of class names that differ between the policy file and the generated
    file.
    """
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "simkv":
            for one in node.names:
                old, new = one.asname or one.name, _name(one.name)
                if old != new and new in _STUBS:
                    yield old, new


def _name(name: str) -> str:
    """Return the current name of a class, given its name in the old module ``simkv.own``."""
    return OLD_NAMES.get(name, name)


def _is_scenario(file: Path) -> bool:
    return file.suffix in (".yaml", ".yml")


def scheduler_class_name(text: str) -> str:
    """Return the name of the asynchronous scheduler class in a generated file."""
    return str(re.findall(r"^class (\w+)\(_Asks, AsyncScheduler\)", text, re.MULTILINE)[0])


def _without_imports(text: str) -> str:
    """Return source code without its module docstring and without imports of simkv and
    ``__future__``.
    """
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    gone = [
        node
        for node in tree.body
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "simkv")
        or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        or (node is tree.body[0] and isinstance(node, ast.Expr))
    ]
    for node in gone:
        assert node.end_lineno is not None
        for number in range(node.lineno - 1, node.end_lineno):
            lines[number] = ""
    return "".join(lines).strip() + "\n"


def check_export(
    file: Path, knobs: dict[str, Any], folder: Path, cases: int
) -> Iterator[tuple[str, Mismatch | None]]:
    """Yield the name of each random case, and its first mismatch or None.

    The exported policy runs in the vLLM scheduler in ``folder`` and is compared with the
    simulation.
    """
    simulated = simulated_spec(file, knobs)
    for trace in record_export(file, knobs, folder, cases):
        yield trace.name, first_mismatch(trace, simulated)


def first_mismatch(trace: DecisionTrace, simulated: EngineSpec) -> Mismatch | None:
    """Return the first difference between a recording and simkv's scheduler, or None."""
    return compare(trace, replay_decisions(simulated, trace.header, len(trace.steps)))[1]


def simulated_spec(file: Path, knobs: dict[str, Any]) -> EngineSpec:
    """Return a specification of vLLM that uses the policy in ``file``, to replay a recording."""
    if _is_scenario(file):
        return policy_spec(file)
    spec, of, _ = load_policy(file)

    def build(config: Any) -> Any:
        return of(spec.config(**{**asdict(config), "name": file.stem}, **knobs))

    return replace(VLLM, build=build)


def record_export(
    file: Path, knobs: dict[str, Any], folder: Path, cases: int
) -> Iterator[DecisionTrace]:
    """Record ``cases`` random cases with the exported policy in the vLLM of ``folder``; yield the
    recordings.
    """
    text = export_policy(file, knobs, file.stem)
    for number in range(cases):
        name = f"{('rand', 'gone')[number % 2]}-{200 + number // 2:03}"
        drawn = make_case(TARGET_RELEASE, name)
        case = drawn._replace(config=replace(drawn.config, policy="fcfs"))
        with stub_vllm_imports(folder):
            module = ModuleType("exported_rule")
            sys.modules[module.__name__] = module
            exec(compile(text, f"{file.stem}.py", "exec"), module.__dict__)
            yield record(case, TARGET_RELEASE, name, _subclass(module, scheduler_class_name(text)))


def _subclass(module: ModuleType, name: str) -> Any:
    """Return a function that maps a scheduler class of vLLM to its subclass in ``module``."""
    rule = name.removesuffix("Scheduler")
    kinds = [getattr(module, f"{rule}{suffix}") for suffix in ("Scheduler", "SyncScheduler")]
    return lambda kind: next(one for one in kinds if one.__mro__[2] is kind)
