"""``simkv run --emit``: write a run's log, spans, metrics and client results as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simkv.core.atomic_files import make_folder, write_text
from simkv.core.engine_version import is_since
from simkv.core.errors import InputError, spelling_hint
from simkv.incident.emit.bench_result_writer import bench_result
from simkv.incident.emit.otel_writer import spans
from simkv.incident.emit.prometheus_writer import query_range
from simkv.incident.emit.sglang_log_writer import sglang_log_lines
from simkv.incident.emit.vllm_log_writer import LogOptions, vllm_log_lines
from simkv.metrics.run_result import RunResult
from simkv.scenario.scenario import Scenario
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.vllm.config import VllmConfig

#: Kinds of output, with the name of the file for each.
KINDS = {
    "vllm-log": "vllm.log",
    "vllm-log-access": "vllm.log",
    "vllm-log-requests": "vllm.log",
    "vllm-log-iterations": "vllm.log",
    "sglang-log": "sglang.log",
    "otel": "spans.jsonl",
    "prometheus": "metrics.json",
    "bench": "bench.json",
}


#: First release (the N of 0.N) of vLLM that uses these metric names.
OLDEST_VLLM = "0.11"
#: Kinds that only one engine writes; client results do not depend on the engine.
_ENGINES = {
    "vllm-log": "vllm",
    "vllm-log-access": "vllm",
    "vllm-log-requests": "vllm",
    "vllm-log-iterations": "vllm",
    "otel": "vllm",
    "sglang-log": "sglang",
}


def parse_kinds(text: str) -> tuple[str, ...]:
    """Parse a list of output formats such as ``vllm-log,otel``.

    Raises InputError for an unknown format.
    """
    kinds = tuple(kind.strip() for kind in text.split(",") if kind.strip())
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(
                f"--emit {kind}: unknown kind{spelling_hint(kind, KINDS)}; expected "
                f"{', '.join(KINDS)}"
            )
    return kinds


def emit(folder: Path, results: Mapping[str, RunResult], kinds: Sequence[str]) -> list[Path]:
    """Write the output files of each variant into its own directory, and return their paths.

    The replicas of a fleet are written as data-parallel ranks of one server. Raises InputError if
    the replicas cannot be ranks of one server, or if a format belongs to another engine.
    """
    check_kinds({variant: result.scenario for variant, result in results.items()}, kinds)
    for variant, result in results.items():
        _check_fleet(variant, result)
    written = []
    for variant, result in results.items():
        target = folder / variant
        make_folder(target)
        for kind in _once(kinds):
            text = "".join(f"{line}\n" for line in _lines(result, kind, kinds))
            write_text(target / KINDS[kind], text)
            written.append(target / KINDS[kind])
    return written


def check_kinds(variants: Mapping[str, Scenario], kinds: Sequence[str]) -> None:
    """Raise InputError if the engine of a variant does not write one of the formats."""
    for variant, scenario in variants.items():
        engine = scenario.engine
        for kind in kinds:
            if engine.name != _ENGINES.get(kind, engine.name):
                raise InputError(
                    f"--emit {kind}: the engine of variant {variant} is {engine.name}; expected "
                    f"{_ENGINES[kind]}"
                )
            if kind == "prometheus":
                _check_metrics(variant, engine)


def _check_fleet(variant: str, result: RunResult) -> None:
    fleet = result.scenario.fleet
    if fleet is None:
        return
    alike = all(spec.engine == result.scenario.engine for spec in result.specs)
    if result.scenario.engine.name != "vllm" or fleet.disaggregated or not alike:
        raise InputError(
            f"--emit: {variant} is a fleet; only fleets of equal vllm replicas are supported"
        )
    if len(result.parts) != fleet.size or fleet.autoscale:
        raise InputError(
            f"--emit: {variant} starts or stops replicas during the run; this is not supported, "
            "because the number of ranks of a real server is fixed"
        )


def _check_metrics(variant: str, engine: Any) -> None:
    if engine.name not in ("vllm", "sglang"):
        raise InputError(f"--emit prometheus: {variant} is {engine.name}; expected vllm or sglang")
    if engine.name == "vllm" and not is_since(engine.variant, OLDEST_VLLM):
        raise InputError(
            f"--emit prometheus: {variant} is vllm {engine.variant}, whose metrics have other "
            f"names; expected {OLDEST_VLLM} or later"
        )


def _once(kinds: Sequence[str]) -> list[str]:
    """Return the formats; a format that writes the same file as an earlier format is left out."""
    return list({KINDS[kind]: kind for kind in kinds}.values())


def _lines(result: RunResult, kind: str, kinds: Sequence[str]) -> Iterator[str]:
    ranks = list(result.parts.values())
    if kind == "otel":
        return spans(result.record)
    if kind == "prometheus":
        return iter([query_range(ranks, result.scenario.engine)])
    if kind == "bench":
        return iter([bench_result(result.record)])
    config = result.scenario.engine
    if isinstance(config, SglangConfig):
        return sglang_log_lines(result.record, config)
    assert isinstance(config, VllmConfig)
    wanted = LogOptions(
        "vllm-log-requests" in kinds, "vllm-log-iterations" in kinds, "vllm-log-access" in kinds
    )
    return vllm_log_lines(ranks, config, wanted)
