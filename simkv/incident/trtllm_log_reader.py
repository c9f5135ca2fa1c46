"""Read TensorRT-LLM's iteration log.

Two formats are read: lines of the PyTorch executor (``print_iter_log: true``), and the JSON
statistics that the C++ runtime writes in Triton (``--log-verbose``). Neither contains request
lengths, so a workload cannot be reconstructed.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from simkv.incident.bounded_table import MAX_LINES, AccessCounts, BoundedTable
from simkv.incident.evidence import SERIES_COLUMNS, Evidence
from simkv.incident.log_lines import ACCESS, LogLine, read_line, read_log_lines
from simkv.workload.trace_source import TraceSource

LINE_PATTERN = re.compile(r"iter = \d|Active Request Count|POST /")
#: Lines that only this engine writes.
OWN_LINE = re.compile(r"\biter = \d+, .*(global_rank|num_scheduled)|Active Request Count\\*\":")
#: Fields that exist in both formats.
_FIELDS = {
    "scheduled": re.compile(r"num_scheduled_requests[:=] ?(\d+)|Scheduled Requests\\*\": ?(\d+)"),
    "active": re.compile(r"currank_total_requests = (\d+)/|Active Request Count\\*\": ?(\d+)"),
    "prefill_tokens": re.compile(r"'num_ctx_tokens': (\d+)|Total Context Tokens\\*\": ?(\d+)"),
    "prefills": re.compile(r"'num_ctx_requests': (\d+)|Context Requests\\*\": ?(\d+)"),
    "decodes": re.compile(r"'num_generation_tokens': (\d+)|Generation Requests\\*\": ?(\d+)"),
    "used": re.compile(r"Used KV cache\s*blocks\\*\": ?(\d+)"),
    "blocks": re.compile(r"Max KV cache\s*blocks\\*\": ?(\d+)"),
    "share": re.compile(r"kv_cache_util\w* = ([\d.]+)"),
}
_SECONDS = re.compile(r"(?:elapsed_time|host_step_time) = ([\d.]+) ?(ms|s)")
_RANK = re.compile(r"(?<!global_)rank = (\d+)")

ENGINE, TITLE = "trtllm", "TensorRT-LLM"
LOGS_ITERATIONS = False
#: Flags of the server that log or export single requests.
REQUEST_FLAGS: str | None = None
#: Oldest release that can be simulated.
OLDEST: str | None = None
#: Setting that limits running requests.
SLOT_SETTING = "max_batch_size"
#: Reason why no workload can be reconstructed from such a log.
LACKS = (
    "an iteration log of TensorRT-LLM has no request lengths; add a client's results, such as "
    "those of `vllm bench serve --save-detailed` or aiperf"
)


def computed_only(version: str) -> bool:  # noqa: ARG001
    """Return whether the prompt token counts in the log lines of a version exclude cached
    tokens.
    """
    return True


def known(text: str) -> bool:
    """Return whether a text contains lines of TensorRT-LLM's iteration log."""
    return bool(OWN_LINE.search(text))


def read(source: TraceSource) -> Evidence:
    """Read the iterations of a log."""
    log = _Log(source)
    for line in read_log_lines(source, LINE_PATTERN):
        read_line((_Log.iteration, _Log.request), log, line)
    timed = bool(log.series)
    table = (log.series if timed else log.untimed).frame()
    name = source.path.name
    return Evidence(
        name,
        wall=timed or table is None,
        engine=ENGINE,
        series=None if table is None else _with_rates(table),
        access=log.access.frame(),
        notes=tuple(f"{name}: {line}" for line in log.series.note("iterations")),
        lacks=(LACKS,),
    )


class _Log:
    """Iterations read so far."""

    def __init__(self, source: TraceSource) -> None:
        self.path = source.path
        self.series, self.untimed = BoundedTable(MAX_LINES, thinned=True), BoundedTable(MAX_LINES)
        self.access = AccessCounts(MAX_LINES)

    def iteration(self, line: LogLine) -> bool:
        """Read the line of an iteration."""
        if not OWN_LINE.search(line.text):
            return False
        found = {name: _number(pattern, line.text) for name, pattern in _FIELDS.items()}
        seconds, rank = _SECONDS.search(line.text), _RANK.search(line.text)
        table = self.untimed if line.at is None else self.series
        active = found["active"]
        running = active if np.isnan(found["scheduled"]) else found["scheduled"]
        active = running if np.isnan(active) else active
        usage = found["share"]
        if found["blocks"] > 0:
            usage = found["used"] / found["blocks"]
        table.append(
            {
                "t_s": float(len(table)) if line.at is None else line.at,
                "engine": int(rank[1]) if rank else 0,
                "running": float(np.nan_to_num(running)),
                "waiting": float(np.nan_to_num(max(active - running, 0.0))),
                "usage": usage,
                "prefill_tokens": found["prefill_tokens"],
                "decodes": found["decodes"],
                "seconds": float(seconds[1]) / (1e3 if seconds[2] == "ms" else 1.0)
                if seconds
                else float("nan"),
            }
        )
        return True

    def request(self, line: LogLine) -> bool:
        """Count an access line."""
        if match := ACCESS.search(line.text):
            self.access.add(int(match["status"]), line.at, line.timed)
        return bool(match)


def _number(pattern: re.Pattern[str], text: str) -> float:
    match = pattern.search(text)
    return float(next(filter(None, match.groups()))) if match else float("nan")


def _with_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Return the iterations with the columns of statistics lines.

    Each row has the token rates of its iteration.
    """
    seconds = table["seconds"].where(table["seconds"] > 0)
    rates = {
        "prompt_rate": table["prefill_tokens"] / seconds,
        "output_rate": table["decodes"] / seconds,
    }
    return table.assign(**rates, hit_rate=float("nan"), preemptions=0)[list(SERIES_COLUMNS)]
