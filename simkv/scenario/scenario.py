"""A scenario as typed models: what a file says, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
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
    """What the scenario's numbers rest on, one sentence each."""

    given: list[str] = Field(default=[])
    """What the public report says."""
    fitted: list[str] = Field(default=[])
    """What was chosen so that its figures come out."""
    assumed: list[str] = Field(default=[])
    """What nothing that is public pins down."""


def _known_figure(name: str) -> str:
    if name not in FIGURE_NAMES:
        raise ValueError(
            f"{name!r} is not a figure of summary.json{spelling_hint(name, FIGURE_NAMES)}; "
            f"expected one of {', '.join(FIGURE_NAMES)}"
        )
    return name


FigureName = Annotated[str, AfterValidator(_known_figure)]


class PublishedFigures(Section):
    """Figures of the public report for one variant, to be shown beside the simulated ones.

    ``figures`` are named as in ``summary.json`` (``e2e_ms.mean``); ``at_least`` are lower bounds;
    ``e2e_s`` and ``finish_s`` are single requests by id, in seconds.
    """

    figures: dict[FigureName, float] = Field(default={})
    """Figures that the report gives, by their names in summary.json (e2e_ms.mean)."""
    at_least: dict[FigureName, float] = Field(default={})
    """The same where the report only says that they are no less."""
    e2e_s: dict[int, float] = Field(default={})
    """How long single requests took (s), by their numbers."""
    finish_s: dict[int, float] = Field(default={})
    """When single requests ended (s), by their numbers."""
    note: str = ""
    """A sentence that is shown beside them."""


Factor = Annotated[float, Field(gt=0, le=1000)]


class StepScale(Section):
    """How many times as long as in the profile a step takes, by what it does."""

    decode: Factor = 1.0
    """Steps that only decode."""
    prefill: Factor = 1.0
    """Steps that only compute prompts."""
    mixed: Factor = 1.0
    """Steps that do both."""
    error: Literal["cheaper", "dearer"] | None = None
    """All steps are off by what the profile knows of its own error, that way."""


class LoraSection(Section):
    """What loading a LoRA adapter takes: its bytes over two links, one after the other.

    The engine does it between steps, when a request is taken in whose adapter is not there. The
    defaults are assumed: all linear layers of a model of 8 B at rank 16, PCIe 4.0 and a local disk.
    """

    adapter_mib: Annotated[float, Field(gt=0)] = 80.0
    """Size of an adapter (MiB)."""
    host_gb_s: Annotated[float, Field(gt=0)] = 20.0
    """From host memory to the GPU (GB/s)."""
    disk_gb_s: Annotated[float, Field(gt=0)] = 1.0
    """From disk into host memory (GB/s)."""
    modules: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Adapters that clients of `simkv serve` ask for as models, as `--lora-modules` names them."""

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a copy to the GPU, and of reading from disk before it."""
        size = self.adapter_mib * 2**20 / 1e9
        return size / self.host_gb_s, size / self.disk_gb_s


class OffloadSection(Section):
    """What copies of KV to and from host memory take, in engines with blocks there; and between
    that and a disk, where KV goes on to one.

    The defaults are assumed: Llama-3.1-8B in bf16, PCIe 4.0, one NVMe disk. Nothing of it was
    calibrated, nor that steps take longer while the GPU's memory is read for copies.
    """

    bytes_per_token: Annotated[float, Field(gt=0)] = 131072.0
    """KV of a token, over all layers, on one GPU; with ``hardware`` that of its model."""
    host_gb_s: Annotated[float, Field(gt=0)] = 20.0
    """Between GPU and host memory (GB/s), each way by itself."""
    latency_us: Annotated[float, Field(ge=0)] = 50.0
    """Of each copy beside that (microseconds)."""
    disk_read_gb_s: Annotated[float, Field(gt=0)] = 5.0
    """From disk into host memory (GB/s)."""
    disk_write_gb_s: Annotated[float, Field(gt=0)] = 5.0
    """From host memory to disk (GB/s)."""
    disk_latency_us: Annotated[float, Field(ge=0)] = 200.0
    """Of each transfer beside that, and of looking whether blocks are there (microseconds)."""


class DrafterSection(Section):
    """What speculative decoding takes beside the model's steps; n-grams of the prompt take nothing.

    The default is assumed: one layer of 32, with the embedding and the output layer.
    """

    share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """A pass of the drafter, as a share of a step in which the model decodes as many sequences."""


class Scenario(Section):
    """One experiment: a workload, an engine with its knobs, and what its steps cost.

    ``timeout`` (s) is how long a client waits for its last token, ``horizon`` (s) ends the run,
    ``engine_ready`` (s) is when the engine looks at its queue for the first time. What a step costs
    follows from ``hardware``, or is in a ``profile``; exactly one of them is needed. With
    ``pipeline`` the three threads of ``fastdeploy`` run side by side, without in lockstep. With
    ``fleet`` the engine is one of several replicas behind a router. ``published``
    and ``expect`` go by the name of the variant; that of a file without variants is ``run``.
    """

    name: AboutField[ScenarioName]
    """What it is called; its results go to runs/<name>/."""
    report: AboutField[Url | None] = None
    """Address of the public report that it replays."""
    summary: AboutField[str] = ""
    """What it shows, in a sentence."""
    workload: WorldField[Workload]
    """The requests that clients send."""
    engine: EngineField[AnyEngine]
    """Which scheduler decides, and its knobs under the engine's own names."""
    hardware: WorldField[HardwareSection | None] = None
    """GPUs and model, from which follows what a step costs; in place of a profile."""
    profile: WorldField[str | None] = Field(default=None, validate_default=True)
    """What a step costs: a packaged profile, or a JSON file beside the scenario."""
    step_scale: WorldField[StepScale | None] = None
    """How many times as long as that a step takes, by what it does."""
    lora: WorldField[LoraSection] = LoraSection()
    """What loading a LoRA adapter takes."""
    offload: WorldField[OffloadSection] = OffloadSection()
    """What copies of KV to and from host memory take."""
    drafter: WorldField[DrafterSection] = DrafterSection()
    """What drafting takes, in engines that draft."""
    timeout: WorldField[PositiveSeconds | None] = None
    """Seconds after which a client gives up; left out, it waits for ever."""
    horizon: WorldField[PositiveSeconds | None] = None
    """Seconds after which the run is cut off; left out, it goes on until nothing is left to do."""
    engine_ready: WorldField[Time] = 0.0
    """Seconds until the engine looks at its queue for the first time."""
    pipeline: EngineField[Pacing | None] = None
    """Delays between FastDeploy's three threads; left out, they go in lockstep."""
    fleet: EngineField[FleetSection | None] = None
    """Several replicas of the engine behind a router."""
    serve: AboutField[ServeSection | None] = None
    """How long answers are when `simkv serve` has real clients in place of the workload."""
    provenance: AboutField[Provenance] = Provenance()
    """What the numbers above rest on."""
    published: AboutField[dict[str, PublishedFigures]] = Field(default={})
    """Figures of the public report by variant, shown beside the simulated ones."""
    expect: AboutField[dict[str, Expectations]] = Field(default={})
    """What must come of a variant, by its name; `run` is that of a file without variants."""

    _origins: SettingOrigins = PrivateAttr(default=SettingOrigins())

    @property
    def origins(self) -> SettingOrigins:
        """Where the settings of its engines are from, given or default."""
        return self._origins

    def with_origins(self, origins: SettingOrigins) -> Self:
        """The same scenario with these origins of its settings."""
        self._origins = origins
        return self

    @model_validator(mode="before")
    @classmethod
    def _rank_by_rank(cls, data: Any) -> Any:
        """Ranks of data-parallel attention without a fleet are one: replicas in lock-step."""
        if not isinstance(data, dict) or data.get("fleet") is not None:
            return data
        ranks = _ranks(data.get("engine"), data.get("hardware"))
        return {**data, "fleet": {"replicas": ranks, "lockstep": True}} if ranks > 1 else data

    @model_validator(mode="before")
    @classmethod
    def _complete_groups(cls, data: Any) -> Any:
        """Engine and hardware of replica groups are the scenario's with what the groups change."""
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
            raise ValueError(
                f"engine: {knob}: {own} beside hardware: dp: {ranks}; expected {ranks}"
            )
        if own > 1 and (self.fleet is None or not self.fleet.lockstep or self.fleet.size != own):
            raise ValueError(
                f"fleet: {own} ranks that attend to requests of their own are "
                f"{{replicas: {own}, lockstep: true}}; or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _pipelines_go_on(self) -> Self:
        if self.pipeline and self.fleet and (self.fleet.failures or self.fleet.autoscale):
            raise ValueError("fleet: replicas with a pipeline cannot fail or be scaled")
        if (
            self.fleet
            and self.fleet.lockstep
            and find_engine_spec(self.engine).offloads(self.engine)
        ):
            raise ValueError("fleet: lockstep is not modelled with KV in host memory")
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
        if "hardware" not in info.data:  # which is wrong by itself
            return profile
        if profile is None and info.data["hardware"] is None:
            raise PydanticCustomError("neither", "missing; profile or hardware is needed")
        if profile is not None and info.data["hardware"] is not None:
            raise ValueError("found beside hardware; exactly one of the two is needed")
        return profile

    @field_validator("pipeline")
    @classmethod
    def _has_threads(cls, pacing: Pacing | None, info: ValidationInfo) -> Pacing | None:
        engine = info.data.get("engine")
        if pacing and engine and not find_engine_spec(engine).has_threads:
            able = " and ".join(name for name, spec in ENGINES.items() if spec.has_threads)
            raise ValueError(f"engine {engine.name} has no pipeline; only {able} does")
        return pacing

    @field_validator("fleet")
    @classmethod
    def _can_step_together(
        cls, fleet: FleetSection | None, info: ValidationInfo
    ) -> FleetSection | None:
        if fleet and fleet.lockstep and len(fleet.groups) > 1:
            raise ValueError("lockstep: replicas step together only if they are all of one group")
        if fleet and fleet.lockstep and info.data.get("pipeline"):
            raise ValueError("lockstep: an engine with a pipeline does not step together")
        return fleet


def _ranks(engine: Any, hardware: Any) -> int:
    """Ranks of data-parallel attention that a file asks for, as far as it is understood."""
    spec = ENGINES.get(str(engine.get("name"))) if isinstance(engine, dict) else None
    said = [engine.get(spec.ranks)] if spec and spec.ranks else []
    said += [hardware.get("dp")] if isinstance(hardware, dict) else []
    return max((n for n in said if isinstance(n, int) and 1 < n <= 1024), default=1)


def _completed(scenario: dict[str, Any], group: Any) -> Any:
    """A group of replicas with what it does not say of its engine or hardware."""
    if not isinstance(group, dict):
        return group
    changed = [name for name in ("engine", "hardware") if isinstance(group.get(name), dict)]
    own = {name: scenario.get(name) for name in changed}
    return {**group, **merge(own, {name: group[name] for name in changed})}


class ScenarioFile(Scenario):
    """A scenario with named overrides, which run side by side.

    An override has the shape of the scenario; what it does not mention stays as it is. ``plan`` is
    what ``simkv plan`` looks for, and means nothing to the others.
    """

    variants: dict[ScenarioName, dict[str, Any]] = Field(default={})
    """Named changes to all of the above, run side by side on the same workload."""
    plan: PlanSection | None = None
    """What simkv plan looks for; the other commands pass over it."""
