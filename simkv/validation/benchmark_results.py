"""Results of load generators: the measured metrics and the load.

read_benchmark(Path("result.json")) # vllm bench serve, guidellm, aiperf, SGLang, ...

Files with single requests are replayed as traces. Files with only metrics, such as the block that
``vllm bench serve`` prints, are replayed with requests of equal lengths.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.figure_registry import LATENCIES
from simkv.core.input_files import read_text
from simkv.validation.guidellm_report import GuidellmLoad, read_loads
from simkv.workload.formats.measured_latencies import read_measured_latencies

#: Names of latencies in the results of vLLM and SGLang.
_LATENCY_NAMES = {"e2el": "e2e_ms", "e2e_latency": "e2e_ms"}
_LATENCY_NAMES |= {name.removesuffix("_ms"): name for name in LATENCIES}
#: Names of latencies in the summaries of aiperf, genai-perf and inference-perf.
_LONG_NAMES = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "itl",
    "request_latency": "e2e",
}
_STATISTICS = {"avg": "mean", "p50": "median"}
_UNIT_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}
_FIGURE = re.compile(r"(mean|median|p9[059])_(\w+?)(?:_ms)?$")
#: Line of a printed block, such as ``Mean TTFT (ms):      12.3``.
_LINE = re.compile(r"^\s*([A-Za-z][\w .%/-]*?)\s*(?:\([^)]*\))?:\s+(inf|[\d.,]+)\s*$", re.MULTILINE)
#: Names in a printed block, by the corresponding name in the JSON result.
_PRINTED = {
    "completed": ("successful requests",),
    "duration": ("benchmark duration",),
    "total_input_tokens": ("total input tokens",),
    "total_output_tokens": ("total generated tokens",),
    "request_throughput": ("request throughput",),
    "output_throughput": ("output token throughput",),
    "request_rate": ("request rate configured", "traffic request rate"),
    "max_concurrency": ("maximum request concurrency", "max request concurrency"),
}

_THROUGHPUTS = ("request_throughput", "output_throughput")


@dataclass(frozen=True)
class BenchmarkResult:
    """Result of a load generator.

    ``figures`` are the metrics, named as in ``summary.json``. ``load`` has fields of
    ``ScenarioOptions``. ``model`` is the model's name, or None. ``notes`` list missing information.
    """

    path: Path
    requests: int
    figures: Mapping[str, float]
    load: Mapping[str, Any]
    model: str | None = None
    notes: tuple[str, ...] = ()
    part: str = ""

    @property
    def name(self) -> str:
        """Path of the file. If the file has several loads, the load is added in parentheses."""
        return self._with_part(str(self.path))

    @property
    def short_name(self) -> str:
        """``name`` without the directory."""
        return self._with_part(self.path.name)

    def _with_part(self, name: str) -> str:
        return f"{name} ({self.part})" if self.part else name


#: Note on a file that has only mean lengths.
MEAN_LENGTHS = "the file has no lengths of single requests: all have the mean lengths"


def read_benchmarks(path: Path) -> list[BenchmarkResult]:
    """Read the results of a load generator.

    A report of guidellm has one result per load; other files have one result. Raises InputError,
    with the file and the fault, if the file cannot be used.
    """
    loads = read_loads(path, _text(path)) if path.is_file() else []
    if len(loads) == 1 and loads[0].has_requests:
        return [_with_requests(path, loads[0].arrivals)]
    return [_of_load(path, load) for load in loads] or [read_benchmark(path)]


def _of_load(path: Path, load: GuidellmLoad) -> BenchmarkResult:
    """Return a load of guidellm as a result with requests of equal lengths."""
    prompt, output = (max(round(length), 1) for length in load.lengths)
    described = {"num_prompts": load.requests, "input_len": prompt, "output_len": output}
    note = MEAN_LENGTHS
    if load.has_requests:
        note = "a report with several loads: the requests of each load have their mean lengths"
    return BenchmarkResult(
        path,
        load.requests,
        load.figures,
        {**described, **load.arrivals},
        notes=(note,),
        part=load.name,
    )


def read_benchmark(path: Path) -> BenchmarkResult:
    """Read the result of a load generator.

    Raises InputError with the name of the file if the file cannot be used.
    """
    if not path.exists():
        raise InputError(f"{path}: does not exist; expected the result of a load generator")
    if path.is_dir():
        return _with_requests(path, {})
    summary = _summary(_text(path))
    if summary is None or _has_requests(summary):
        return _with_requests(path, summary or {})
    figures = _figures(path, summary)
    if not any(name.startswith(("ttft_ms", "tpot_ms", "e2e_ms")) for name in figures):
        raise InputError(f"{path}: contains no latency; expected a field such as mean_ttft_ms")
    completed = _whole(path, summary, "completed")
    lengths = [_whole(path, summary, f"total_{side}_tokens") for side in ("input", "output")]
    load: dict[str, Any] = {"num_prompts": completed, **_arrivals(summary)}
    load |= {
        "input_len": max(round(lengths[0] / completed), 1),
        "output_len": max(round(lengths[1] / completed), 1),
    }
    return BenchmarkResult(path, completed, figures, load, _model(summary), (MEAN_LENGTHS,))


def _text(path: Path) -> str:
    """Return the content of a file; empty for a compressed file, which only formats of traces may
    be.
    """
    return "" if path.suffix == ".gz" else read_text(path)


def _summary(text: str) -> dict[str, Any] | None:
    """Return the values of a result as a dictionary, or None.

    The text is a JSON object, several objects (the last is used), or a printed block.
    """
    for part in (text, *reversed(text.strip().splitlines()[-1:])):
        try:
            found = json.loads(part)
        except (ValueError, RecursionError):
            continue
        flat = _flatten(found) if isinstance(found, dict) else {}
        return flat if "completed" in flat else None
    printed = {
        re.sub(r"\W+", "_", name.strip().lower()).strip("_"): math.inf
        if value == "inf"
        else float(value.replace(",", ""))
        for name, value in _LINE.findall(text)
    }
    named = {
        ours: printed[spelling]
        for ours, words in _PRINTED.items()
        for word in words
        if (spelling := word.replace(" ", "_")) in printed
    }
    return {**printed, **named} if "completed" in named else None


def _flatten(result: dict[str, Any]) -> dict[str, Any]:
    """Return a summary of inference-perf, aiperf or genai-perf with the flat names of vLLM."""
    # inference-perf, with latencies in seconds
    if isinstance(good := result.get("successes"), dict):
        load = result.get("load_summary") or {}
        through, latency = good.get("throughput") or {}, good.get("latency") or {}
        found = {
            "completed": good.get("count"),
            "output_throughput": through.get("output_tokens_per_sec"),
            "request_throughput": through.get("requests_per_sec"),
            "request_rate": load.get("requested_rate") or load.get("achieved_rate"),
            "max_concurrency": load.get("concurrency"),
        }
        lengths = {"input": good.get("prompt_len"), "output": good.get("output_len")}
        means = {side: (values or {}).get("mean") for side, values in lengths.items()}
        values = {name: {**one, "unit": "s"} for name, one in latency.items() if one}
    elif isinstance(result.get("time_to_first_token"), dict):  # aiperf and genai-perf
        values = {name: one for name, one in result.items() if isinstance(one, dict)}
        average = {name: one.get("avg") for name, one in values.items()}
        found = {
            "completed": average.get("request_count") or _find(result, "request_count"),
            "output_throughput": average.get("output_token_throughput"),
            "request_throughput": average.get("request_throughput"),
            "request_rate": _find(result, "request_rate"),
            "max_concurrency": _find(result, "concurrency"),
        }
        means = {side: average.get(f"{side}_sequence_length") for side in ("input", "output")}
    else:
        return result
    for side, mean in means.items():
        if mean and found["completed"]:
            found[f"total_{side}_tokens"] = mean * found["completed"]
    for name, ours in _LONG_NAMES.items():
        unit = _UNIT_MS.get(str(values.get(name, {}).get("unit")))
        for statistic, value in values.get(name, {}).items():
            if unit and isinstance(value, int | float):
                found[f"{_STATISTICS.get(statistic, statistic)}_{ours}_ms"] = unit * value
    return found


def _find(tree: Any, name: str) -> float | None:
    """Return the first number with the given key in nested objects."""
    if not isinstance(tree, dict):
        return None
    if (value := _positive(tree, name)) is not None:
        return value
    return next((one for part in tree.values() if (one := _find(part, name)) is not None), None)


def _has_requests(summary: Mapping[str, Any]) -> bool:
    return all(
        isinstance(summary.get(name), list) for name in ("input_lens", "output_lens", "start_times")
    )


def _figures(path: Path, summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a result by their names in ``summary.json``.

    Load generators write 0, null or NaN for a metric without a sample; such metrics are omitted.
    Raises InputError if a metric is negative or not a number.
    """
    found: dict[str, float] = {}
    for name, raw in summary.items():
        match = _FIGURE.match(name)
        latency = _LATENCY_NAMES.get(match[2]) if match else None
        if name not in _THROUGHPUTS and latency is None:
            continue
        numeric = isinstance(raw, int | float) and not isinstance(raw, bool)
        if raw is not None and (not numeric or raw < 0):
            raise InputError(f"{path}: {name}: expected a number of 0 or more, found {raw!r}")
        if (value := _positive(summary, name)) is not None:
            found[f"{latency}.{match[1]}" if match and latency else name] = value
    return found


def _positive(summary: Mapping[str, Any], name: str) -> float | None:
    """Return a value if it is a finite number above 0, or None."""
    value = summary.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None


def _whole(path: Path, summary: Mapping[str, Any], name: str) -> int:
    value = _positive(summary, name)
    if value is None or value < 1:
        found = summary.get(name)
        raise InputError(f"{path}: {name}: expected a number of 1 or more, found {found!r}")
    return int(value)


def _arrivals(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request rate and the concurrency of the client."""
    found: dict[str, Any] = {}
    if rate := _positive(summary, "request_rate"):
        found["request_rate"] = rate
        if burstiness := _positive(summary, "burstiness"):
            found["burstiness"] = burstiness
    if most := _positive(summary, "max_concurrency"):
        found["max_concurrency"] = max(int(most), 1)
    return found


def _model(summary: Mapping[str, Any]) -> str | None:
    name = summary.get("model_id") or summary.get("model")
    return name if isinstance(name, str) and name else None


def _with_requests(path: Path, summary: Mapping[str, Any]) -> BenchmarkResult:
    """Read a benchmark result with latencies of single requests, in any supported format."""
    table = read_measured_latencies(path)
    served = table[table["output_tokens"] > 0]
    if served.empty:
        raise InputError(f"{path}: contains no request with an answer")
    found: dict[str, float] = {}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        values = served[name].dropna()
        if not values.empty:
            found[f"{name}.mean"] = float(values.mean())
            found[f"{name}.median"] = float(values.median())
            found[f"{name}.p99"] = float(values.quantile(0.99))
    if not found:
        raise InputError(f"{path}: contains no measured request latencies")
    ends = served["arrival_s"] + served["e2e_ms"] / 1e3
    seconds = float(ends.max() - served["arrival_s"].min())
    if seconds > 0:
        found["output_throughput"] = float(served["output_tokens"].sum()) / seconds
        found["request_throughput"] = len(served) / seconds
    load: dict[str, Any] = {"trace": path}
    # A client that limits its concurrency sends requests when others end, not at recorded times.
    if "max_concurrency" in (arrivals := _arrivals(summary)):
        load |= {"max_concurrency": arrivals["max_concurrency"], "request_rate": math.inf}
        if "request_rate" in arrivals:
            load |= arrivals
    return BenchmarkResult(
        path, len(served), {**found, **_figures(path, summary)}, load, _model(summary)
    )
