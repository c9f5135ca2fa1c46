"""Build a scenario from command-line options instead of a file.

    options = ScenarioOptions(gpu="H100", model="llama-3.1-8b", request_rate=10.0, num_prompts=600)
    built = build_scenario(options)
    built.document   # as read from a file; errors name the option
    built.notes      # options of launch lines that have no effect, and assumptions

The options for the load have the names, units and defaults of ``vllm bench serve``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkv.core.engine_spec import EngineSpec
from simkv.core.engine_version import (
    find_version,
    nearest_release,
    plain_release,
    release_of_variant,
)
from simkv.core.errors import InputError, spelling_hint
from simkv.core.server_options import RankOptions
from simkv.scenario.launch_line import LaunchLine, has_experts, read_launch_line
from simkv.scenario.recipes import find_recipe
from simkv.scenario.scenario_options import ScenarioOptions, find_flag
from simkv.scenario.trace_peak import find_peak_start, parse_duration
from simkv.scenario.yaml_document import YamlDocument
from simkv.schedulers.engine_registry import DEFAULT, ENGINES
from simkv.workload.formats.bench_command import read_bench_command

#: Origin that error messages state for a scenario built from options.
ORIGIN = Path("command line")
#: Defaults of ``vllm bench serve --dataset-name random``.
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 1000, 1024, 128


@dataclass(frozen=True)
class BuiltScenario:
    """A scenario as a document, with notes for the user and the launch line, if any.

    ``ranks`` is the number of data-parallel ranks that the scenario simulates as replicas.
    """

    document: YamlDocument
    notes: tuple[str, ...]
    line: LaunchLine | None = None
    ranks: int = 1


def build_scenario(options: ScenarioOptions) -> BuiltScenario:
    """Build a scenario from options. Raises InputError with the name of an invalid option.

    A GPU is required. A model is required unless there is a launch line.
    """
    if options.recipe is None:
        built = _Builder(options)
        built.build()
    else:
        recipe = find_recipe(options.recipe)
        built = _Builder(recipe.apply(options))
        built.notes += recipe.notes()
        built.build({} if options.from_command else recipe.fields())
    ranks = built.document.tree.get("fleet", {}).get("replicas", 1)
    return BuiltScenario(built.document, tuple(built.notes), built.line, ranks)


def _after_growth(options: ScenarioOptions, rate: float) -> str:
    if options.growth is None:
        return ""
    return f"; with --growth {options.growth:g}, {options.growth * rate:.3g} per second"


class _Builder:
    """Builder of the document; it records the option that set each field."""

    def __init__(self, options: ScenarioOptions) -> None:
        self.options = options
        self.document = YamlDocument(ORIGIN, {})
        self.notes: list[str] = []
        self.line = None
        if options.from_command is not None:
            self.line = read_launch_line(options.from_command)
            self.notes += self.line.summary()

    def build(self, more: Mapping[str, str] | None = None) -> None:
        """Build the document; ``more`` has fields that the launch line does not state."""
        spec = self._spec()
        options, line = self.options, self.line
        model = options.model or (line.model if line else None)
        if model is None:
            raise InputError("--model: missing; expected a model such as Qwen/Qwen3-32B")
        if options.gpu is None:
            raise InputError("--gpu: missing; expected a GPU such as H100, H200 or L40S")
        self._set("name", make_name(model, options.gpu), None)
        self._load()
        self._set("engine.name", spec.name, "engine")
        self._version(spec)
        self._set("hardware.gpu", options.gpu, "gpu")
        self._set("hardware.model", model, "model" if options.model else "from_command")
        ignored = self._ignored(spec)
        for path, value in (line.fields if line else {}).items():
            if path in ignored:
                continue
            self._set(path, value, None)
            text = line.given_by(path) if line else None
            self.document.given_by[tuple(path.split("."))] = f"--from-command: {text or path}"
        for path, text in (more or {}).items():
            self._set(path, text, None)
        self._ranks(spec, model)
        if line is None and spec.longest in spec.launch.fitted:
            self._set(f"engine.{spec.longest}", "auto", None)
        if spec.drafts and self._has(f"engine.{spec.drafts}"):
            self.notes.append(
                "no draft tokens are accepted; set the acceptance rate with --set "
                "workload.acceptance=RATE"
            )

    def _spec(self) -> EngineSpec:
        name = self.options.engine
        if name is None:
            return ENGINES[self.line.engine] if self.line else DEFAULT
        if name not in ENGINES:
            raise InputError(
                f"--engine {name}: unknown engine{spelling_hint(name, ENGINES)}; expected one of "
                f"{', '.join(ENGINES)}"
            )
        if self.line and self.line.engine != name:
            raise InputError(
                f"--engine {name}: the launch command starts {self.line.engine}; remove --engine"
            )
        return ENGINES[name]

    def _version(self, spec: EngineSpec) -> None:
        """Set the engine variant: the given variant, or the one nearest to the release of an
        image.
        """
        asked, stated = self.options.version, self.line.version if self.line else None
        if asked is not None:
            known = find_modelled_variant(spec, asked)
            if known is None and find_version(asked):
                known = nearest_variant(spec, asked)
                self.notes.append(f"{spec.name} {asked} is simulated with the rules of {known}")
                self._set("engine.variant", known, None)
            else:
                self._set("engine.variant", asked, "version")
            return
        if stated is None:
            variant = str(spec.config().variant)
            self.notes.append(
                f"release of {spec.name}: {variant} (to use another release: --version)"
            )
            return
        variant = find_modelled_variant(spec, stated) or nearest_variant(spec, stated)
        self._set("engine.variant", variant, "from_command")
        if variant != stated:
            self.notes.append(f"{spec.name} {stated} is simulated with the rules of {variant}")

    def _ignored(self, spec: EngineSpec) -> Mapping[str, str]:
        """Return the fields that the release ignores, and record a note for each.

        Options that the release does not have are noted, too.
        """
        line, server = self.line, spec.server_options
        if line is None or server is None:
            return {}
        variant = self.document.tree["engine"].get("variant") or spec.config().variant
        release = release_of_variant(str(variant))
        absent = [one.text for one in line.options if server.is_absent(one.text, one.name, release)]
        if absent:
            self.notes.append(
                f"{spec.name} {release} refuses to start with options that it does not have: "
                f"{', '.join(absent)}"
            )
        found = server.ignored(line.values, release)
        self.notes += [note for path, note in found.items() if path in line.fields]
        return found

    def _ranks(self, spec: EngineSpec, model: str) -> None:
        """Set tensor and data parallelism. Options override the launch line."""
        options = self.options
        if options.tp is not None:
            self._set("hardware.tp", options.tp, "tp")
        if options.dp is None or options.dp == 1:
            return
        if spec.server_options is None:
            raise InputError(f"--dp {options.dp}: not supported for {spec.name}; expected 1")
        tp = options.tp or (self.line.fields.get("hardware.tp") if self.line else None) or 1
        ranks = RankOptions(tp, options.dp, has_experts(model), {})
        for path, value in spec.server_options.ranks(ranks).items():
            self._set(path, value, "dp")

    def _load(self) -> None:
        """Set the workload: a benchmark's command, a trace, or lengths at a rate."""
        options = self.options
        if options.load is not None:
            self._no_other_load("load", ("trace", *_SYNTHETIC))
            command = read_bench_command(options.load)
            self.notes += [f"--load: {line}" for line in command.summary()]
            self._set("workload", command.workload, "load")
        elif options.trace is not None:
            self._no_other_load("trace", ("input_len", "output_len", "range_ratio", "prefix_len"))
            self._trace(options.trace)
        else:
            for name in ("growth", "peak"):
                if getattr(options, name) is not None:
                    raise InputError(f"{find_flag(name)}: requires --trace")
            self._synthetic()

    def _no_other_load(self, name: str, others: tuple[str, ...]) -> None:
        for other in others:
            if getattr(self.options, other) is not None:
                raise InputError(f"{find_flag(other)}: cannot be combined with {find_flag(name)}")

    def _trace(self, trace: Path) -> None:
        """Set a workload that replays a trace or its busiest period, at any speed."""
        options = self.options
        if not trace.exists():
            raise InputError(f"--trace {trace}: this file does not exist")
        self._set("workload.trace", str(trace), "trace")
        names = {
            "limit": "num_prompts",
            "request_rate": "request_rate",
            "burstiness": "burstiness",
            "max_concurrency": "max_concurrency",
            "seed": "seed",
            "rate_scale": "growth",
        }
        for path, name in names.items():
            if getattr(options, name) is not None:
                self._set(f"workload.{path}", getattr(options, name), name)
        if options.peak is None:
            return
        if options.request_rate is not None:
            raise InputError("--peak: cannot be combined with --request-rate")
        seconds = parse_duration(options.peak, "--peak")
        start, count = find_peak_start(trace, seconds)
        self._set("workload.start", start, "peak")
        self._set("workload.duration", seconds, "peak")
        self.notes.append(
            f"busiest {options.peak}: starts at {start:,.0f} s of the trace, {count:,} "
            f"requests, {count / seconds:.3g} per second{_after_growth(options, count / seconds)}"
        )

    def _synthetic(self) -> None:
        """Set arrivals and lengths as in the dataset ``random`` of ``vllm bench serve``."""
        options = self.options
        pairs = {
            "num_prompts": (options.num_prompts or NUM_PROMPTS, "num_prompts"),
            "request_rate": (
                math.inf if options.request_rate is None else options.request_rate,
                "request_rate",
            ),
            "burstiness": (options.burstiness, "burstiness"),
            "prompt_tokens": (self._length(options.input_len or INPUT_LEN), "input_len"),
            "output_tokens": (self._length(options.output_len or OUTPUT_LEN), "output_len"),
            "seed": (options.seed, "seed"),
        }
        if options.prefix_len:
            pairs["prefix_group"] = ("shared", "prefix_len")
            pairs["prefix_tokens"] = (options.prefix_len, "prefix_len")
            prompt = self._length(options.input_len or INPUT_LEN, options.prefix_len)
            pairs["prompt_tokens"] = (prompt, "input_len")
        for path, (value, name) in pairs.items():
            if value is not None:
                self._set(f"workload.arrivals.{path}", value, name)
        if options.max_concurrency is not None:
            self._set("workload.max_concurrency", options.max_concurrency, "max_concurrency")

    def _length(self, tokens: int, shared: int = 0) -> Any:
        ratio = self.options.range_ratio
        if not ratio:
            return tokens + shared
        if not shared:
            return {"distribution": "random", "len": tokens, "range_ratio": ratio}
        low, high = math.floor(tokens * (1 - ratio)), math.ceil(tokens * (1 + ratio))
        return {"distribution": "uniform", "low": max(low, 1) + shared, "high": high + shared}

    def _set(self, path: str, value: Any, option: str | None) -> None:
        """Set the field at ``path``. ``option`` is the field of ScenarioOptions with the value."""
        keys = path.split(".")
        node = self.document.tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value
        given = None if option is None else getattr(self.options, option)
        if option and given is not None:
            text = f"{find_flag(option)} {given}"
            self.document.given_by[tuple(keys)] = text if len(text) < 80 else find_flag(option)

    def _has(self, path: str) -> bool:
        node: Any = self.document.tree
        for key in path.split("."):
            if not isinstance(node, Mapping) or key not in node:
                return False
            node = node[key]
        return bool(node)


#: Options that are replaced by a benchmark's command.
_SYNTHETIC = (
    "request_rate",
    "burstiness",
    "max_concurrency",
    "num_prompts",
    "input_len",
    "output_len",
    "range_ratio",
    "prefix_len",
    "seed",
    "growth",
    "peak",
)


def make_name(model: str, *gpus: str) -> str:
    """Return a name for the scenario, such as ``qwen3-32b-h100``."""
    path = Path(model)
    short = path.parent.name or path.stem if path.suffix == ".json" else path.name
    text = re.sub(r"[^a-z0-9.]+", "-", "-".join([short, *gpus]).lower()).strip("-.")
    return text[:60] or "scenario"


def find_modelled_variant(spec: EngineSpec, version: str) -> str | None:
    """Return the name of the variant for an engine's version, or None if simkv does not model
    it.
    """
    found = find_version(version)
    plain = plain_release(version) or (found.base_version if found else version)
    for name in (plain if plain_release(version) else version, plain):
        try:
            known = spec.naming.variant_of(name)
        except ValueError:
            continue
        if name in spec.variants or known != name:
            return name
    return None


def nearest_variant(spec: EngineSpec, version: str) -> str:
    """Return the modelled release that is nearest to a version."""
    releases = [name for name in spec.variants if plain_release(name) == name]
    if not releases:
        return str(spec.config().variant)
    found = find_version(version)
    plain = plain_release(version) or (found.base_version if found else version)
    return nearest_release(plain if found else "0", releases)
