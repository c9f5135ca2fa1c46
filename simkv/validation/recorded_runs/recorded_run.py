"""A recorded run: its engine, its requests and their measured times.

A recorded run is a directory. ``case.json`` describes engine, model, GPU and origin.
``requests.csv`` has one row per request in order of arrival, with times in ms. LLMServingSim's
``requests.jsonl`` or aiperf's ``profile_export.jsonl`` can replace it. If prompts share prefixes,
another file lists their blocks (see ``workload.formats.recorded_case``). Values that were not
recorded are null. If only statistics are public, they are in case.json (see ``read_statistics``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simkv.core.errors import InputError
from simkv.costs.hardware.host_links import HostLink, find_link
from simkv.costs.sources.measurement_files import (
    ColumnKind,
    RowPredicate,
    find_table,
    read_table,
)
from simkv.validation.recorded_runs.published_statistics import (
    METRICS,
    read_statistics,
    sample_requests,
)
from simkv.workload.formats.measured_latencies import read_measured_latencies
from simkv.workload.generated_requests import Arrivals

#: Requests of this stage are used for calibration and never scored.
CALIBRATION_STAGE = "sync"
_SENT = ("arrival_s", "prompt_tokens", "output_tokens")
_NEEDED: dict[str, ColumnKind] = {
    "arrival_s": "number",
    "prompt_tokens": "whole",
    "output_tokens": "whole",
    "ttft_ms": "number",
    "e2e_ms": "number",
}
#: Output files of benchmark clients that are read if there is no requests.csv.
BENCHMARK_FILES = ("requests.jsonl", "profile_export.jsonl")


class _Facts(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_recorded(cls, data: Any) -> Any:
        """Treat null as a missing field if the field is optional."""
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {
            name: value
            for name, value in data.items()
            if value is not None or name not in fields or fields[name].is_required()
        }


class ModelDimensions(_Facts):
    """Dimensions of the model, such as its number of layers, which determine its costs."""

    layers: int = Field(gt=0)
    q_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    kv_bytes_per_token: int = Field(gt=0)
    hidden: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None


class LinkFacts(_Facts):
    """Measured latency and bandwidth between the GPUs of the host."""

    latency_us: float = Field(ge=0)
    bandwidth_gb_s: float = Field(gt=0)


class EngineFacts(_Facts):
    """Settings of the engine that were recorded."""

    engine: str
    version: str
    gpu: str
    tensor_parallel: int = Field(1, gt=0)
    data_parallel: int = Field(1, gt=0)
    expert_parallel: bool | None = None
    max_num_seqs: int = Field(gt=0)
    max_num_batched_tokens: int = Field(gt=0)
    max_model_len: int | None = None
    block_size: int = Field(16, gt=0)
    num_gpu_blocks: int | None = Field(None, gt=0)
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    scheduler_reserve_full_isl: bool | None = None
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    dtype: str | None = None
    link: LinkFacts | str | None = None

    @property
    def host_link(self) -> HostLink | None:
        """Link between the GPUs, or None if no link was recorded.

        Raises InputError for an unknown name.
        """
        if self.link is None or isinstance(self.link, str):
            return find_link(self.link) if self.link else None
        latency, bandwidth = 1e-6 * self.link.latency_us, 1e9 * self.link.bandwidth_gb_s
        return HostLink(name="host link", latency=latency, bandwidth=bandwidth, source="case.json")

    @property
    def gpus(self) -> int:
        """Number of GPUs that communicate in a step."""
        return max(self.tensor_parallel, self.expert_ranks)

    @property
    def caches(self) -> bool:
        """Whether prefix caching is on. True unless the record states that it is off."""
        return self.enable_prefix_caching is not False

    @property
    def expert_ranks(self) -> int:
        """Number of GPUs over which the experts of a mixture of experts are distributed."""
        return self.tensor_parallel * self.data_parallel if self.expert_parallel else 1


class Origin(_Facts):
    """Origin of a record: the project's own simulator, and the errors of this simulator in
    percent.
    """

    simulator: str = "origin"
    published: dict[str, Any] = {}
    recomputed_from_committed_sim_csv: dict[str, Any] = {}


class RunFacts(_Facts):
    """Contents of ``case.json``.

    ``max_concurrency`` is the maximum number of requests in flight in a closed loop, or None for
    recorded arrivals. ``measured`` contains published statistics, and ``arrivals`` describes the
    requests, if no data on single requests are public.
    """

    name: str
    model: str
    model_dims: ModelDimensions
    engine: EngineFacts
    makespan_s: float | None = None
    preemptions: int | None = None
    origin_simulator: Origin = Origin()
    calibration: list[str] = []
    max_concurrency: int | None = Field(None, gt=0)
    workload: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    arrivals: Arrivals | None = None


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run.

    ``requests`` has one row per request of the file ``table``, with its measured times (ms).
    ``from_queue`` is true if TTFT and E2E start when the engine core receives a request. ``scored``
    selects the requests to compare. ``told`` contains the published statistics (ms) by metric name.
    """

    folder: Path
    table: Path
    facts: RunFacts
    requests: pd.DataFrame
    from_queue: bool
    scored: pd.Series[bool]
    told: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run in ``case.json``."""
        return self.facts.name

    @property
    def has_isolated_requests(self) -> bool:
        """Whether some requests ran in isolation, so that costs can be fitted to them."""
        return not bool(self.scored.all())

    @property
    def has_prefixes(self) -> bool:
        """Whether the record contains shared prefixes."""
        if not self.table.name.startswith("requests.csv"):
            return False
        there = any((self.folder / f"prefix_blocks.jsonl{end}").is_file() for end in ("", ".gz"))
        return there or "shared_prefix_tokens" in self.requests

    @property
    def makespan_s(self) -> float | None:
        """Seconds from the first arrival to the last token, or None if unknown."""
        if self.facts.makespan_s is not None or self.told:
            return self.facts.makespan_s
        ends = self.requests["arrival_s"] + self.requests["e2e_ms"] / 1e3
        return float(ends.max() - self.requests["arrival_s"].min())


def read_recorded_run(folder: Path) -> RecordedRun:
    """Read a recorded run. Raises InputError with file and field if the run is invalid."""
    path = folder / "case.json"
    try:
        facts = RunFacts.model_validate(json.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise InputError(
            f"{folder}: not a recorded case: {path.name} cannot be read "
            f"({(error.strerror or str(error)).lower()})"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        value = first["input"]
        found = "" if isinstance(value, dict | list) else f"; found {json.dumps(value)}"
        raise InputError(f"{path}: {where or 'all'}: {first['msg'].lower()}{found}") from error
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    table, requests = _requests(folder, facts)
    known = {} if "ttft_ms" in requests else read_statistics(facts.measured, path)
    for name in METRICS:
        if name not in requests:
            requests[name] = float("nan")
        elif table.name.startswith("requests.csv"):
            read_table(table, {name: "number"}, _filled(name))
    scored = pd.Series(True, index=requests.index)
    if "stage" in requests:
        scored = requests["stage"] != CALIBRATION_STAGE
    if not scored.any():
        raise InputError(
            f"{table}: stage: all rows have the stage {CALIBRATION_STAGE!r}, so there are no "
            "rows to compare"
        )
    return RecordedRun(folder, table, facts, requests, "queued_s" in requests, scored, known)


def _requests(folder: Path, facts: RunFacts) -> tuple[Path, pd.DataFrame]:
    """Return the file with a run's requests, and its rows in order of arrival.

    The file is ``requests.csv``, or the output of a benchmark client in a supported trace format,
    or case.json if the requests are sampled.
    """
    raw = [
        folder / name for name in (*BENCHMARK_FILES, *(f"{name}.gz" for name in BENCHMARK_FILES))
    ]
    taken = next((path for path in raw if path.is_file()), None)
    prepared = any((folder / f"requests.csv{end}").is_file() for end in ("", ".gz"))
    if taken is not None and not prepared:
        return taken, _in_order(read_measured_latencies(taken))
    if facts.arrivals is not None and not prepared:
        return folder / "case.json", sample_requests(facts.arrivals)
    table = find_table(folder, "requests")
    timed = not facts.measured or "ttft_ms" in pd.read_csv(table, nrows=0)
    read_table(table, _NEEDED if timed else dict.fromkeys(_SENT, "number"))
    return table, _in_order(pd.read_csv(table))


def _in_order(requests: pd.DataFrame) -> pd.DataFrame:
    return requests.sort_values("arrival_s", kind="stable", ignore_index=True)


def _filled(name: str) -> RowPredicate:
    return lambda table: table[name].notna()


def find_recorded_runs(folder: Path) -> list[Path]:
    """Return the directories of recorded runs in ``folder``, sorted by name.

    If ``folder`` itself is a recorded run, return only this directory.
    """
    if (folder / "case.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/case.json"))
    if not found:
        raise InputError(
            f"{folder}: not a recorded case: no case.json in this folder or its subfolders"
        )
    return found
