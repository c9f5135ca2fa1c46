"""Typed model of a scenario and of a scenario file."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from simkv.core.errors import spelling_hint
from simkv.core.figure_registry import FIGURE_NAMES
from simkv.scenario.base_section import (
    PositiveSeconds,
    ScenarioName,
    Section,
    Url,
)
from simkv.scenario.engine_section import AnyEngine, check_kv_connector, check_no_kv_connector
from simkv.scenario.expectations import Expectations
from simkv.scenario.field_roles import AboutField, EngineField, WorldField
from simkv.scenario.fleet_section import FleetSection
from simkv.scenario.hardware_section import HardwareSection
from simkv.scenario.launch_defaults import SettingOrigins
from simkv.scenario.overrides import merge
from simkv.scenario.plan_section import PlanSection
from simkv.scenario.serve_section import ServeSection
from simkv.scenario.thread_pacing import Pacing
from simkv.schedulers.engine_registry import ENGINES, find_engine_spec
from simkv.workload.workload_base import Time
from simkv.workload.workload_section import Workload


class Provenance(Section):
    """Sources of the numbers in the scenario, each in one sentence."""

    given: list[str] = Field(default=[])
    """Values that the public report states."""
    fitted: list[str] = Field(default=[])
    """Values that were fitted to reproduce the metrics of the report."""
    assumed: list[str] = Field(default=[])
    """Values that no public source determines."""
    calibration: str = ""
    """Error of the calibration of the step times, as `simkv calibrate` writes it."""

    @model_serializer(mode="wrap")
    def _without_calibration(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out ``calibration`` if it is empty, as earlier releases did."""
        whole: dict[str, Any] = dump(self)
        return {key: value for key, value in whole.items() if key != "calibration" or value}


def _known_figure(name: str) -> str:
    if name not in FIGURE_NAMES:
        raise ValueError(
            f"unknown metric {name!r} of summary.json{spelling_hint(name, FIGURE_NAMES)}; "
            f"expected one of {', '.join(FIGURE_NAMES)}"
        )
    return name


FigureName = Annotated[str, AfterValidator(_known_figure)]


class PublishedFigures(Section):
    """Metrics that the public report states for one variant.

    The keys of ``figures`` and ``at_least`` are named as in ``summary.json`` (``e2e_ms.mean``).
    ``at_least`` contains lower bounds. ``e2e_s`` and ``finish_s`` are times of single requests in
    seconds, by request id.
    """

    figures: dict[FigureName, float] = Field(default={})
    """Metrics that the report states, by their names in summary.json (e2e_ms.mean)."""
    at_least: dict[FigureName, float] = Field(default={})
    """Metrics for which the report gives only a lower bound."""
    e2e_s: dict[int, float] = Field(default={})
    """E2E latency of single requests (s), by id."""
    finish_s: dict[int, float] = Field(default={})
    """Finish time of single requests (s), by id."""
    note: str = ""
    """Note that is shown beside the metrics."""


Factor = Annotated[float, Field(gt=0, le=1000)]


#: Values of ``step_scale.error`` before 0.3, with the values that replace them.
_OLD_ERROR_SIDES = {"cheaper": "faster", "dearer": "slower"}


def _rename_error_side(value: object) -> object:
    """Return the current spelling of an old value, with a warning."""
    if not isinstance(value, str) or value not in _OLD_ERROR_SIDES:
        return value
    new = _OLD_ERROR_SIDES[value]
    warnings.warn(
        f"step_scale.error: {value!r} was renamed; use {new!r}", FutureWarning, stacklevel=2
    )
    return new


class StepScale(Section):
    """Factors that multiply the step times of the profile, by kind of step."""

    decode: Factor = 1.0
    """Factor for steps that only decode."""
    prefill: Factor = 1.0
    """Factor for steps that only prefill."""
    mixed: Factor = 1.0
    """Factor for steps that contain both prefills and decodes."""
    error: Annotated[Literal["faster", "slower"] | None, BeforeValidator(_rename_error_side)] = None
    """Change all step times by the known error of the profile, towards ``faster`` or ``slower``
    steps."""


class LoraSection(Section):
    """Time to load a LoRA adapter from disk and to copy it to the GPU.

    The engine loads an adapter between two steps. The defaults are assumptions: adapters for all
    linear layers of an 8B model at rank 16, PCIe 4.0 and a local disk.
    """

    adapter_mib: Annotated[float, Field(gt=0)] = 80.0
    """Size of an adapter (MiB)."""
    host_gb_s: Annotated[float, Field(gt=0)] = 20.0
    """Bandwidth from host memory to the GPU (GB/s)."""
    disk_gb_s: Annotated[float, Field(gt=0)] = 1.0
    """Bandwidth from disk to host memory (GB/s)."""
    modules: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Names of the adapters that clients of `simkv serve` may request as models, as with vLLM's
    `--lora-modules`."""

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds to copy an adapter to the GPU, and seconds to read it from disk."""
        size = self.adapter_mib * 2**20 / 1e9
        return size / self.host_gb_s, size / self.disk_gb_s


class OffloadSection(Section):
    """Time to copy KV between GPU and host memory, and between host memory and disk.

    The defaults are assumptions, not calibrated: Llama-3.1-8B in bf16, PCIe 4.0, one NVMe disk. In
    a real engine, copies also slow down steps; this is not modelled.
    """

    bytes_per_token: Annotated[float, Field(gt=0)] = 131072.0
    """KV cache bytes per token, over all layers on one GPU (with `hardware`, computed from the
    model)."""
    host_gb_s: Annotated[float, Field(gt=0)] = 20.0
    """Bandwidth between GPU and host memory, per direction (GB/s)."""
    latency_us: Annotated[float, Field(ge=0)] = 50.0
    """Additional latency per copy (microseconds)."""
    disk_read_gb_s: Annotated[float, Field(gt=0)] = 5.0
    """Bandwidth from disk to host memory (GB/s)."""
    disk_write_gb_s: Annotated[float, Field(gt=0)] = 5.0
    """Bandwidth from host memory to disk (GB/s)."""
    disk_latency_us: Annotated[float, Field(ge=0)] = 200.0
    """Additional latency per transfer and per lookup of blocks on disk (microseconds)."""


class DrafterSection(Section):
    """Time of the drafter in speculative decoding.

    The default of `share`, 0.05, is an assumption: one layer of 32, the embedding and the output
    layer. For multi-token prediction with `hardware`, the time of one layer and the output head is
    computed.
    """

    share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Duration of a drafter pass as a fraction of the model's decode step at the same batch size.
    Default: 0.05; for `mtp` with `hardware`, the time of one layer of the model."""


class FrontEndSection(Section):
    """Time of the API server in front of each engine.

    Missing fields have values that are packaged with simkv.
    """

    request_ms: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """CPU time per request for HTTP, validation and the chat template (ms)."""
    prompt_token_us: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """CPU time per prompt token for tokenization (microseconds)."""
    output_token_us: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """CPU time per token sent to a client (microseconds)."""
    latency_ms: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Additional delay of a request that uses no CPU (ms)."""
    processes: Annotated[int, Field(gt=0, le=1024)] = 1
    """Number of processes that share the work, as with vLLM's `--api-server-count`."""


class Scenario(Section):
    """An experiment: a workload, an engine with its settings, and the costs of its steps.

    Step costs come from either ``hardware`` or a ``profile``. ``timeout`` (s) is the time that a
    client waits for its last token. ``horizon`` (s) is the end of the run. ``engine_ready`` (s) is
    the time at which the engine first reads its queue. ``pipeline`` describes the three parallel
    threads of ``fastdeploy``; without it, they run in lockstep. With ``fleet``, the engine is one
    of several replicas behind a router. ``published`` and ``expect`` have one entry per variant;
    without variants, the entry is named ``run``.
    """

    name: AboutField[ScenarioName]
    """Name of the scenario; results are written to runs/<name>/."""
    report: AboutField[Url | None] = None
    """URL of the public report that the scenario replays."""
    summary: AboutField[str] = ""
    """Summary in one sentence."""
    workload: WorldField[Workload]
    """Requests that clients send."""
    engine: EngineField[AnyEngine]
    """Engine and its settings, under the engine's own names."""
    hardware: WorldField[HardwareSection | None] = None
    """GPUs and model from which step costs are computed. Use this or `profile`."""
    profile: WorldField[str | None] = Field(default=None, validate_default=True)
    """Step costs: name of a packaged profile, or path of a JSON file relative to the scenario file.
    """
    step_scale: WorldField[StepScale | None] = None
    """Factors that step times are multiplied by, by kind of step."""
    lora: WorldField[LoraSection] = LoraSection()
    """Time that the engine needs to load a LoRA adapter."""
    offload: WorldField[OffloadSection] = OffloadSection()
    """Time to copy KV to and from host memory."""
    drafter: WorldField[DrafterSection] = DrafterSection()
    """Time of the drafter in engines with speculative decoding."""
    front_end: WorldField[FrontEndSection | Literal["none"] | None] = None
    """Time of the API server. If omitted, packaged values apply with `hardware`, and no time with
    `profile`."""
    timeout: WorldField[PositiveSeconds | None] = None
    """Client timeout (s); if omitted, the client waits without limit."""
    horizon: WorldField[PositiveSeconds | None] = None
    """Time at which the run is cut off (s); if omitted, the run ends when no work is left."""
    engine_ready: WorldField[Time] = 0.0
    """Time at which the engine first reads its queue (s)."""
    pipeline: EngineField[Pacing | None] = None
    """Delays between FastDeploy's three threads; if omitted, they run in lockstep."""
    fleet: EngineField[FleetSection | None] = None
    """Replicas of the engine behind a router."""
    serve: AboutField[ServeSection | None] = None
    """Output lengths for real clients of `simkv serve`, which replace the workload."""
    provenance: AboutField[Provenance] = Provenance()
    """Sources of the numbers in the scenario."""
    published: AboutField[dict[str, PublishedFigures]] = Field(default={})
    """Metrics that the public report states, by variant; shown beside the simulated ones."""
    expect: AboutField[dict[str, Expectations]] = Field(default={})
    """Expected results by variant; `run` in a file without variants."""

    _origins: SettingOrigins = PrivateAttr(default=SettingOrigins())

    @property
    def origins(self) -> SettingOrigins:
        """Origins of the engine settings: given, or chosen by the launcher."""
        return self._origins

    def with_origins(self, origins: SettingOrigins) -> Self:
        """Set the origins of the engine settings and return the scenario."""
        self._origins = origins
        return self

    @model_validator(mode="before")
    @classmethod
    def _rank_by_rank(cls, data: Any) -> Any:
        """Convert data-parallel ranks without a fleet to replicas in lockstep."""
        if not isinstance(data, dict) or data.get("fleet") is not None:
            return data
        ranks = _ranks(data.get("engine"), data.get("hardware"))
        return {**data, "fleet": {"replicas": ranks, "lockstep": True}} if ranks > 1 else data

    @model_validator(mode="before")
    @classmethod
    def _complete_groups(cls, data: Any) -> Any:
        """Add the scenario's engine and hardware fields to replica groups that do not set them."""
        fleet = data.get("fleet") if isinstance(data, dict) else None
        if not isinstance(fleet, dict) or not isinstance(fleet.get("replicas"), list):
            return data
        whole = [_completed(data, group) for group in fleet["replicas"]]
        return {**data, "fleet": {**fleet, "replicas": whole}}

    @model_validator(mode="after")
    def _ranks_step_together(self) -> Self:
        knob = find_engine_spec(self.engine).ranks
        ranks = self.hardware.dp if self.hardware else 1
        own = getattr(self.engine, knob) if knob else ranks
        if self.hardware and own != ranks:
            raise ValueError(f"engine: {knob}: must equal hardware.dp ({ranks}), got {own}")
        if own > 1 and (self.fleet is None or not self.fleet.lockstep or self.fleet.size != own):
            raise ValueError(
                f"fleet: {own} data-parallel ranks require "
                f"{{replicas: {own}, lockstep: true}}; set this or remove fleet"
            )
        return self

    @model_validator(mode="after")
    def _pipelines_continue(self) -> Self:
        if self.pipeline and self.fleet and (self.fleet.failures or self.fleet.autoscale):
            raise ValueError("fleet: replicas with a pipeline section cannot fail or be scaled")
        if (
            self.fleet
            and self.fleet.lockstep
            and find_engine_spec(self.engine).offloads(self.engine)
        ):
            raise ValueError("fleet: lockstep cannot be combined with KV in host memory")
        if self.fleet and self.fleet.disaggregated:
            engines = [group.engine or self.engine for group in self.fleet.groups]
            check_kv_connector(engines, [group.role for group in self.fleet.groups])
        else:
            groups = self.fleet.groups if self.fleet else []
            check_no_kv_connector([self.engine, *(g.engine for g in groups if g.engine)])
        return self

    @field_validator("profile")
    @classmethod
    def _costs_are_said_once(cls, profile: str | None, info: ValidationInfo) -> str | None:
        if "hardware" not in info.data:  # this is reported as a separate error
            return profile
        if profile is None and info.data["hardware"] is None:
            raise PydanticCustomError("neither", "missing; set profile or hardware")
        if profile is not None and info.data["hardware"] is not None:
            raise ValueError("cannot be combined with hardware; set exactly one of them")
        return profile

    @field_validator("pipeline")
    @classmethod
    def _has_threads(cls, pacing: Pacing | None, info: ValidationInfo) -> Pacing | None:
        engine = info.data.get("engine")
        if pacing and engine and not find_engine_spec(engine).has_threads:
            able = " and ".join(name for name, spec in ENGINES.items() if spec.has_threads)
            raise ValueError(
                f"engine {engine.name} has no asynchronous pipeline; only {able} has one"
            )
        return pacing

    @field_validator("fleet")
    @classmethod
    def _can_step_together(
        cls, fleet: FleetSection | None, info: ValidationInfo
    ) -> FleetSection | None:
        if fleet and fleet.lockstep and len(fleet.groups) > 1:
            raise ValueError("lockstep: requires all replicas in one group")
        if fleet and fleet.lockstep and info.data.get("pipeline"):
            raise ValueError("lockstep: cannot be combined with pipeline")
        return fleet


def _ranks(engine: Any, hardware: Any) -> int:
    """Return the number of data-parallel ranks in a file; 1 if the field is missing or invalid."""
    spec = ENGINES.get(str(engine.get("name"))) if isinstance(engine, dict) else None
    said = [engine.get(spec.ranks)] if spec and spec.ranks else []
    said += [hardware.get("dp")] if isinstance(hardware, dict) else []
    return max((n for n in said if isinstance(n, int) and 1 < n <= 1024), default=1)


def _completed(scenario: dict[str, Any], group: Any) -> Any:
    """Return a replica group. Missing engine and hardware fields come from the scenario."""
    if not isinstance(group, dict):
        return group
    changed = [name for name in ("engine", "hardware") if isinstance(group.get(name), dict)]
    own = {name: scenario.get(name) for name in changed}
    return {**group, **merge(own, {name: group[name] for name in changed})}


class ScenarioFile(Scenario):
    """A scenario with named overrides (variants), which are run and compared.

    An override has the structure of a scenario. Missing fields keep the scenario's values. ``plan``
    is used only by ``simkv plan``.
    """

    variants: dict[ScenarioName, dict[str, Any]] = Field(default={})
    """Named overrides of scenario fields; all variants run on the same workload."""
    plan: PlanSection | None = None
    """Defaults of `simkv plan`; other commands ignore this section."""
