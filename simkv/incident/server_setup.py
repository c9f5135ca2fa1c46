"""Build the engine section of the scenario from the sources, the user's settings and assumptions.

A source may use the engine's name of a setting or its flag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.core.engine_flags import flags
from simkv.core.engine_spec import EngineConfig, EngineSpec
from simkv.core.engine_version import parse_version, plain_release
from simkv.core.errors import InputError, nearest_names
from simkv.core.launcher_rules import LaunchError, LaunchTarget
from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
from simkv.costs.hardware.kv_capacity import compute_kv_capacity
from simkv.costs.hardware.model_gpu_catalog import (
    architectures,
    find_architecture,
    find_gpu,
    gpus,
    known_gpu,
    known_model,
)
from simkv.costs.hardware.replica_hardware import make_hardware
from simkv.incident.evidence import Evidence
from simkv.scenario.launch_defaults import target_of_gpu
from simkv.scenario.launch_line import option_fields
from simkv.scenario.scenario_builder import find_modelled_variant, nearest_variant
from simkv.schedulers.engine_registry import ENGINES, find_engine_spec

Floats = npt.NDArray[np.float64]
#: Minimum queue time of a request that waited for resources (s).
MIN_QUEUE_S = 0.5
#: Names of the model and of the tensor parallel size in the inputs.
MODEL = ("model", "model_path", "model_tag")
TENSOR_PARALLEL = ("tensor_parallel_size", "tp_size")


@dataclass(frozen=True)
class UserSettings:
    """The user's settings for the server, which override the sources.

    ``overrides`` contains values by field of the engine's config.
    """

    engine: str | None = None
    version: str | None = None
    gpu: str | None = None
    model: str | None = None
    tp: int | None = None
    dp: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerSetup:
    """The engine's section of the scenario, the hardware if known, and the source of each value.

    ``assumed`` lists the assumption for each missing setting. ``guessed`` is true if the KV cache
    size is assumed or derived from the GPU. ``sized`` is true if the size is given or derived from
    the GPU. ``ranks`` is the number of data-parallel ranks. ``lockstep`` is true if all ranks start
    each step together.
    """

    engine: dict[str, Any]
    gpu: str | None
    model: str | None
    tp: int
    sources: dict[str, str]
    assumed: tuple[str, ...]
    guessed: bool = False
    sized: bool = True
    ranks: int = 1
    lockstep: bool = False

    @property
    def fleet(self) -> dict[str, Any] | None:
        """The fleet section for data-parallel ranks behind the engine's load balancer, or None."""
        if self.ranks == 1:
            return None
        spec = ENGINES[self.engine["name"]]
        fleet = {"replicas": self.ranks, **spec.rank_router}
        return fleet | {"lockstep": self.lockstep} if spec.ranks_in_lockstep else fleet


def infer_setup(evidence: Evidence, asked: UserSettings) -> ServerSetup:
    """Return the server's setup, inferred from the evidence and the user's settings.

    Raises InputError if the engine is unknown or the setup is invalid.
    """
    name = asked.engine or evidence.engine
    if name is None:
        raise InputError(
            f"--engine: the inputs do not identify the engine; expected one of {', '.join(ENGINES)}"
        )
    if name not in ENGINES:
        raise InputError(f"--engine {name}: unknown engine; expected one of {', '.join(ENGINES)}")
    if asked.engine and evidence.engine and asked.engine != evidence.engine:
        raise InputError(
            f"--engine {name}: does not match {evidence.source}, which was written by "
            f"{evidence.engine}"
        )
    return _Maker(ENGINES[name], evidence, asked).made()


class _Maker:
    """Builder of the engine section, field by field."""

    def __init__(self, spec: EngineSpec, evidence: Evidence, asked: UserSettings) -> None:
        self.spec, self.evidence, self.asked = spec, evidence, asked
        self.names = {one.name for one in fields(spec.config)}
        self.by_flag = option_fields(spec)
        self.sources: dict[str, str] = {}
        self.assumed: list[str] = []
        self.guessed = False
        self.tp = asked.tp or int(self._told(*TENSOR_PARALLEL) or 1)
        self.ranks = asked.dp or int(self._told("data_parallel_size", "dp_size") or 0)
        self.ranks = self.ranks or _told_of(evidence.series)
        self.gpu = asked.gpu
        self.model = asked.model or _text(self._told(*MODEL))
        _check_hardware(asked)
        self._trace_hardware()

    def made(self) -> ServerSetup:
        engine: dict[str, Any] = {"name": self.spec.name, "variant": self._variant()}
        for name, known in self.evidence.settings.items():
            field_name = name if name in self.names else self.by_flag.get(name)
            if field_name and known.value is not None and field_name not in ("name", "variant"):
                engine[field_name] = known.value
                self.sources[field_name] = known.where
        for name, value in self.asked.overrides.items():
            if name not in self.names:
                raise InputError(f"--set engine.{name}: {self.spec.name} has no such setting")
            engine[name], self.sources[name] = value, "as given"
        self._fit_version(engine)
        machine = self._machine()
        if machine:
            self._take(engine, self.spec.launch.before(engine, machine))
        self._memory(engine)
        self._longest(engine, machine)
        if machine and self.spec.longest is None:
            self._take(engine, self.spec.launch.after(engine, machine))
        self._tell_defaults(engine)
        model = known_model(self.model or "")
        if self.asked.model and model is None:
            self.assumed.append(
                f"step costs are fitted from the inputs alone: the layers of {self.asked.model} "
                "differ, so the hardware gives no initial values"
            )
        elif (self.asked.model and not self.gpu) or (self.asked.gpu and not self.model):
            missing = "--model" if not self.model else "--gpu"
            self.assumed.append(f"without {missing}, the hardware gives no initial step costs")
        return ServerSetup(
            self._valid(engine),
            self.gpu,
            self.model,
            self.tp,
            self.sources,
            tuple(self.assumed),
            self.guessed,
            not self.guessed or self.spec.memory in self.sources,
            self.ranks,
            self.ranks > 1 and bool(model and model.experts),
        )

    def _trace_hardware(self) -> None:
        """Store the sources of the model, the GPU and the tensor parallel size."""
        known = self.evidence.settings
        for name, asked, names in (
            ("model", self.asked.model, MODEL),
            ("gpu", self.asked.gpu, ()),
            ("tensor_parallel_size", self.asked.tp, TENSOR_PARALLEL),
        ):
            where = next((known[one].where for one in names if one in known), None)
            if asked or where:
                self.sources[name] = "as given" if asked else str(where)

    def _told(self, *names: str) -> Any:
        known = self.evidence.settings
        return next((known[name].value for name in names if name in known), None)

    def _variant(self) -> str:
        """Return the variant of the server's version, or the nearest variant."""
        version = self.asked.version or _text(self._told("version"))
        releases = [name for name in self.spec.variants if plain_release(name) == name]
        if version is None:
            likely = self._likely(releases)
            self.assumed.append(
                f"the version of {self.spec.name} is unknown: {likely} is assumed (--version)"
            )
            return likely
        self.sources["variant"] = "as given" if self.asked.version else self._where("version")
        known = find_modelled_variant(self.spec, version)
        if known is not None:
            return known
        nearest_one = nearest_variant(self.spec, version) if releases else self._likely(())
        self.assumed.append(
            f"{self.spec.name} {version} is not modelled; using the nearest, {nearest_one}"
        )
        return nearest_one

    def _likely(self, releases: Sequence[str]) -> str:
        """Return the newest release that has the logged settings, or the default variant.

        If an engine logs all of its options, a missing option suggests a release without it.
        """
        if not releases:
            return str(self.spec.config().variant)
        known = set(self.evidence.settings)
        lacks = {name: set(self.spec.lacks.get(name, ())) for name in releases}
        doubtful: set[str] = set()
        if known and self.spec.logs_all_options:
            doubtful = set(flags(self.spec.config)).intersection(chain(*lacks.values()))

        def against(name: str) -> int:
            return len(lacks[name] & known) + len(doubtful - lacks[name] - known)

        newest_first = sorted(releases, key=parse_version, reverse=True)
        return min(newest_first, key=against)

    def _where(self, name: str) -> str:
        return self.evidence.settings[name].where

    def _machine(self) -> LaunchTarget | None:
        """Return the GPU and model for the engine's launcher, or None if the GPU is unknown."""
        gpu = known_gpu(self.gpu or "")
        if gpu is None:
            return None
        try:
            return target_of_gpu(gpu, find_architecture(self.model) if self.model else None)
        except InputError:
            return target_of_gpu(gpu)

    def _take(self, engine: dict[str, Any], chosen: Mapping[str, Any]) -> None:
        """Adopt settings chosen by the launcher."""
        gpu = known_gpu(self.gpu or "")
        for name, value in chosen.items():
            engine[name] = value
            self.sources[name] = f"default of {self.spec.name} on {gpu.name if gpu else self.gpu}"

    def _fit_version(self, engine: dict[str, Any]) -> None:
        """Remove settings that the version does not have."""
        lacking = self.spec.lacks.get(self.spec.naming.variant_of(engine["variant"]), ())
        for name in lacking:
            if name in engine and self.sources.get(name) != "as given":
                del engine[name]
                self.sources.pop(name, None)

    def _longest(self, engine: dict[str, Any], machine: LaunchTarget | None) -> None:
        """Set an unknown maximum length of requests.

        The length is the model's maximum if the cache can hold it. Otherwise it suffices for all
        served requests.
        """
        requests, longest = self.evidence.requests, self.spec.longest
        if longest is None:
            return
        most = 0
        if requests is not None:
            most = int((requests["prompt_tokens"] + requests["output_tokens"]).max()) + 1
        if longest not in engine and machine and self.spec.memory in self.sources:
            try:
                chosen = self.spec.launch.after(engine, machine)
            except LaunchError:  # the server was started with a smaller maximum
                chosen = {}
            if chosen.get(longest, 0) >= most:
                self._take(engine, chosen)
        if longest not in engine and requests is not None:
            engine[longest] = max(most, int(self._default(longest)))
            self.assumed.append(
                f"{longest} is unknown: {engine[longest]} is assumed, which is enough for all "
                "requests"
            )
        self._holds_longest(engine, longest)

    def _holds_longest(self, engine: dict[str, Any], longest: str) -> None:
        """Enlarge an assumed cache so that it can hold the longest sequence."""
        memory, block = self.spec.memory, self._block(engine)
        if engine.get(longest) and not self.spec.memory_in_tokens and memory not in self.sources:
            engine[memory] = max(engine[memory], engine[longest] // block + 2)

    def _block(self, engine: dict[str, Any]) -> int:
        """Return the number of tokens per block."""
        return int(engine.get(self.spec.block) or self._default(self.spec.block))

    def _memory(self, engine: dict[str, Any]) -> None:
        """Set the KV cache size: given, derived from the hardware, or estimated from the
        requests.
        """
        memory, tokens = self.spec.memory, self._told("kv_tokens")
        block = self._block(engine)
        if engine.get(memory) not in (None, "auto"):
            return
        self.guessed = not tokens
        if tokens:
            engine[memory] = int(tokens) if self.spec.memory_in_tokens else int(tokens) // block
            self.sources[memory] = self._where("kv_tokens")
        elif blocks := self._room(engine):
            engine[memory] = blocks * block if self.spec.memory_in_tokens else blocks
            self.sources[memory] = f"memory of {self.gpu} that {self.model} leaves free"
        else:
            blocks, why = _held(self.evidence.requests, block)
            blocks = -(-blocks // self.ranks)
            engine[memory] = blocks * block if self.spec.memory_in_tokens else blocks
            self.assumed.append(
                f"{memory} is unknown: {engine[memory]} is assumed, {why} (include the log's "
                f"beginning, or use --gpu and --model, or --set engine.{memory}=N)"
            )

    def _room(self, engine: dict[str, Any]) -> int:
        """Return the number of blocks that fit on the GPU, or 0 if the GPU or the model is
        unknown.
        """
        if not (self.gpu and self.model):
            return 0
        try:
            ep = self.tp * self.ranks if self._told("enable_expert_parallel") else self.tp
            hardware = make_hardware(
                find_gpu(self.gpu),
                find_architecture(self.model),
                tp=self.tp,
                ep=ep if self.ranks > 1 and ep > 1 else 1,
                dp=self.ranks if ep > self.tp else 1,
            )
            roomy = {**engine, self.spec.memory: 1 << 24}
            return compute_kv_capacity(
                hardware, find_execution_settings(self.spec.config(**roomy))
            ).num_gpu_blocks
        except (InputError, ValueError, TypeError):
            if self.asked.gpu and self.asked.model:
                raise
            return 0

    def _default(self, name: str) -> Any:
        return next(one.default for one in fields(self.spec.config) if one.name == name)

    def _tell_defaults(self, engine: dict[str, Any]) -> None:
        """Report the assumed defaults of important settings."""
        decisive = (
            self.spec.seats,
            self.spec.block,
            "max_num_batched_tokens",
            "chunked_prefill_size",
        )
        for name in decisive:
            if name in self.names and name not in engine:
                self.assumed.append(
                    f"{name} is unknown: the default {self._default(name)} is assumed"
                )

    def _valid(self, engine: dict[str, Any]) -> dict[str, Any]:
        """Return the validated section. A start-up check that fails is disabled, as the server did
        start.
        """
        try:
            self.spec.config(**engine)
        except ValueError as error:
            if "startup_check" not in self.names:
                raise InputError(
                    f"the settings found in the inputs are an invalid combination: {error}; "
                    f"change a setting with --set engine.NAME=VALUE"
                ) from error
            loose = {**engine, "startup_check": False}
            try:
                self.spec.config(**loose)
            except ValueError as other:
                raise InputError(
                    f"the settings found in the inputs are an invalid combination: {other}; "
                    f"change a setting with --set engine.NAME=VALUE"
                ) from other
            self.assumed.append(
                f"the start-up check was skipped, because the real server did start: {error}"
            )
            return loose
        except TypeError as error:
            raise InputError(
                f"the settings found in the inputs are an invalid combination: {error}; change a "
                f"setting with --set engine.NAME=VALUE"
            ) from error
        return engine


def _check_hardware(asked: UserSettings) -> None:
    """Raise InputError with the nearest names if the user's GPU or model is unknown."""
    if asked.gpu and known_gpu(asked.gpu) is None:
        names = [gpu.name for gpu in gpus()]
        raise InputError(f"--gpu: unknown GPU {asked.gpu!r}; {nearest_names(asked.gpu, names)}")
    if asked.model:
        try:
            find_architecture(asked.model)
        except InputError as error:
            names = [one.name for one in architectures()]
            raise InputError(
                f"--model: unknown model {asked.model!r}; {nearest_names(asked.model, names)}. "
                "`simkv profile list` lists all; without --model, step costs are fitted from the "
                "inputs"
            ) from error


def _told_of(series: pd.DataFrame | None) -> int:
    """Return the number of data-parallel ranks in the lines of a log."""
    if series is None:
        return 1
    return max(series["engine"].nunique(), int(-series["engine"].min()), 1)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _held(requests: pd.DataFrame | None, block: int) -> tuple[int, str]:
    """Return the estimated number of blocks of the cache, and the reason for the estimate in words.

    If requests waited, the estimate is the peak number of blocks held by requests, or else twice
    the peak.
    """
    if requests is None or requests["queue_ms"].isna().all():
        return 1 << 16, "more than any request needs"
    served = requests.dropna(subset=["queue_ms", "e2e_ms"])
    begin = (served["t_s"] + served["queue_ms"] / 1e3).to_numpy(np.float64)
    end = (served["t_s"] + served["e2e_ms"] / 1e3).to_numpy(np.float64)
    prompt = served["prompt_tokens"].to_numpy(np.float64)
    output = served["output_tokens"].to_numpy(np.float64)
    peak = 0.0
    for at in end - 1e-6:
        runs = (begin <= at) & (at < end)
        share = (at - begin[runs]) / np.maximum(end[runs] - begin[runs], 1e-9)
        peak = max(peak, float(np.ceil((prompt[runs] + share * output[runs]) / block).sum()))
    if (served["queue_ms"] > 1e3 * MIN_QUEUE_S).any():
        return int(peak) + 1, "the blocks in use while other requests waited"
    return 2 * int(peak) + 1, "twice the blocks in use, because no request waited"


def kv_memory(engine: EngineConfig) -> int:
    """Return the engine's KV cache size in the unit of its setting."""
    size: int = getattr(engine, find_engine_spec(engine).memory)
    return size


def kv_tokens(engine: EngineConfig) -> int:
    """Return the KV cache size of an engine in tokens."""
    spec, size = find_engine_spec(engine), kv_memory(engine)
    return size if spec.memory_in_tokens else size * spec.block_size(engine)
