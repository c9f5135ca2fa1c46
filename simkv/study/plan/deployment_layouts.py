"""Layouts of a deployment: its GPU, tensor parallelism, tokens per step and prefill replicas.

``deployment_search`` searches the number of (decode) replicas of a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simkv.core.errors import InputError
from simkv.costs.hardware.model_memory import kv_bytes
from simkv.scenario.hardware_section import build_hardware
from simkv.scenario.scenario import Scenario
from simkv.scenario.yaml_document import YamlDocument
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.study.plan.candidate_results import CandidateResults
from simkv.study.plan.plan_preparation import PreparedPlan, prepare
from simkv.study.plan.plan_request import PlanRequest
from simkv.study.sweep_axes import parse_axis

#: Tensor parallel sizes and tokens per step that are tried by default.
TP_SIZES = (1, 2, 4, 8)
STEP_TOKENS = (2048, 8192, 16384)
#: Bandwidth in GB/s per GPU between prefill and decode replicas by default: a 400 Gb/s network.
KV_BANDWIDTH = 50.0
TP, REPLICAS = "hardware.tp", "fleet.replicas"

LeftOut = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Layout:
    """A deployment whose number of replicas is searched, and the results of the search.

    With ``prefill`` replicas, the candidates are the numbers of decode replicas.
    """

    prepared: PreparedPlan
    results: CandidateResults
    prefill: int = 0

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens per step."""
        engine = self.scenario.engine
        return int(getattr(engine, find_engine_spec(engine).step_tokens))

    @property
    def tp(self) -> int:
        """Number of GPUs of a tensor-parallel group; 1 without hardware."""
        return self.scenario.hardware.tp if self.scenario.hardware else 1

    @property
    def scenario(self) -> Scenario:
        """Scenario with the smallest number of replicas."""
        return self.prepared.case.scenario(0)

    @property
    def place(self) -> str:
        """GPU, variant and other ``--over`` values of the layout; may be empty."""
        words = self.prepared.label.split()
        kept = [word for word in words if not word.startswith(f"{TP}=")]
        return " ".join(word.removeprefix("hardware.gpu=") for word in kept)

    def describe(self, replicas: int) -> str:
        """Return the layout with the given number of (decode) replicas as text."""
        tp = f"tp {self.tp}"
        if self.prefill:
            return f"{self.prefill} prefill + {replicas} decode, {tp}"
        return f"{replicas} x {tp}"


def prepare_layouts(
    document: YamlDocument, request: PlanRequest, tp_given: bool, left_out: LeftOut
) -> tuple[list[Layout], tuple[int, ...]]:
    """Return two lists: layouts, and the values to try for the number of tokens per step. There is
    one layout for each GPU and tensor parallel size.

    With ``tp_given``, only the tensor parallel size of the scenario is tried. ``left_out`` receives
    the layouts that do not fit. Raises InputError if the input is invalid.
    """
    for name in ("held_back", "exhaustive", "cliff", "largest"):
        if getattr(request, name):
            option = "--held-out" if name == "held_back" else f"--{name}"
            raise InputError(f"{option}: cannot be combined with --tune")
    axes = {parse_axis(text).path: text for text in request.each}
    step_tokens = _step_tokens(axes)
    if TP not in axes and not tp_given and document.tree.get("hardware"):
        axes[TP] = f"{TP}={','.join(map(str, TP_SIZES))}"
    asked = request.model_copy(update={"each": tuple(axes.values())})
    prepared = prepare(document, asked, left_out)
    if prepared[0].case.knob != REPLICAS:
        raise InputError(
            f"--smallest {request.smallest}: --tune searches the number of replicas; expected "
            f"--smallest {REPLICAS}=LOW..HIGH"
        )
    return [Layout(one, CandidateResults(one.case)) for one in prepared], step_tokens


def _step_tokens(axes: dict[str, str]) -> tuple[int, ...]:
    """Remove the axis with the numbers of tokens per step from ``axes``, and return its values.

    Without such an axis, return the default values.
    """
    for path, text in axes.items():
        section, _, name = path.partition(".")
        if section == "engine" and name in ("max_num_batched_tokens", "chunked_prefill_size"):
            del axes[path]
            return tuple(int(value) for value in parse_axis(text).values if value is not None)
    return STEP_TOKENS


def with_step_tokens(layout: Layout, tokens: int) -> Layout:
    """Return the layout with another number of tokens per step.

    Raises InputError if the number is invalid.
    """
    name = find_engine_spec(layout.scenario.engine).step_tokens
    return _derived(layout, [f"engine.{name}={tokens}"], REPLICAS, None, 0)


def split_layout(layout: Layout, prefill: int, decode: int, bandwidth: float) -> Layout:
    """Return the layout with ``prefill`` prefill replicas and up to ``decode`` decode replicas.

    ``bandwidth`` is in GB/s per GPU. Raises InputError if the engine cannot transfer KV, or if the
    size of the KV is unknown.
    """
    section = layout.scenario.hardware
    if section is None:
        raise InputError(
            "a split needs a hardware section: without it, the KV bytes per token are unknown"
        )
    hardware = build_hardware(section)
    per_gpu = sum(
        one.count * kv_bytes(one.attention, hardware) for one in hardware.architecture.layers
    )
    size, speed = int(per_gpu * layout.tp), bandwidth * 1e9 * layout.tp
    groups = f"[{{role: prefill, count: {prefill}}}, {{role: decode, count: 1}}]"
    overrides = [
        f"{REPLICAS}={groups}",
        f"fleet.kv_transfer={{bytes_per_token: {size}, bandwidth: {speed:.6e}}}",
    ]
    return _derived(layout, overrides, f"{REPLICAS}.1.count", range(1, decode + 1), prefill)


def _derived(
    layout: Layout,
    overrides: Sequence[str],
    knob: str,
    candidates: Sequence[int] | None,
    prefill: int,
) -> Layout:
    case = layout.prepared.case
    case = replace(
        case,
        overrides=(*case.overrides, *overrides),
        knob=knob,
        candidates=case.candidates if candidates is None else tuple(candidates),
        _scenarios={},
    )
    case.check()
    return Layout(replace(layout.prepared, case=case), CandidateResults(case), prefill)
