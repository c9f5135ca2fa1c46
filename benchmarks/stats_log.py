"""Write the vLLM log of a recorded run: the start-up lines, and a statistics line every 10 s.

If the record has the server's metrics over time, including cache usage, the lines contain these
metrics. Otherwise, running and waiting requests and tokens are computed from the requests, and
cache usage from the size of the cache on the GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
from simkv.costs.hardware.kv_capacity import compute_kv_capacity
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.replica_hardware import make_hardware
from simkv.incident.emit.log_dates import format_time
from simkv.incident.emit.vllm_log_writer import STATS_INTERVAL_S, stats_line
from simkv.schedulers.vllm.config import VllmConfig

#: Columns of a timeline, with their names in records.
COLUMNS = {
    "t_s": "t",
    "prompt_tok_per_s": "prompt_throughput",
    "gen_tok_per_s": "gen_throughput",
}


def lines_of_case(folder: Path, case: dict[str, Any], table: pd.DataFrame) -> str:
    """Return the log of the case in ``folder``; ``table`` has its requests."""
    engine = case["engine"]
    blocks, ranks = engine.get("num_gpu_blocks") or _room(case), engine.get("data_parallel", 1)
    args = {name: engine[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    if engine.get("max_model_len"):
        args["max_model_len"] = engine["max_model_len"]
    if ranks > 1:
        args |= {"data_parallel_size": ranks, "enable_expert_parallel": True}
    timeline = _recorded(folder)
    if timeline is None:
        timeline = _of_requests(table, ranks * blocks * engine["block_size"])
    start = [
        f"[api_server.py:1839] vLLM API server version {engine['version']}",
        f"[utils.py:233] non-default args: {args!r}",
        f"[kv_cache_utils.py:1087] GPU KV cache size: {blocks * engine['block_size']:,} tokens",
    ]
    lines = [(-60.0, text) for text in start]
    for row in timeline.itertuples(index=False):
        told = (row.prompt, row.output, int(row.running), int(row.waiting), row.usage, row.hits)
        lines.append((row.t_s, stats_line(*told, engine=-ranks if ranks > 1 else 0)))
    return "".join(
        f"(APIServer pid=1) INFO {format_time(at, '%m-%d %H:%M:%S')} {text}\n" for at, text in lines
    )


def gpu_of(case: dict[str, Any]) -> str:
    """Return the name of one GPU; a record names several GPUs as ``2 x NVIDIA …``."""
    return str(case["engine"]["gpu"]).removeprefix("2 x ").partition(" (")[0]


def _room(case: dict[str, Any]) -> int:
    engine = case["engine"]
    ranks = engine.get("data_parallel", 1)
    hardware = make_hardware(
        find_gpu(gpu_of(case)), find_architecture(case["model"]), ep=ranks, dp=ranks
    )
    config = VllmConfig(
        name="vllm",
        variant=engine["version"],
        num_gpu_blocks=1 << 24,
        max_num_seqs=engine["max_num_seqs"],
    )
    return compute_kv_capacity(hardware, find_execution_settings(config)).num_gpu_blocks


def _recorded(folder: Path) -> pd.DataFrame | None:
    """Return the server's own metrics every 10 s; None if cache usage is missing."""
    path = folder / "timeseries.csv"
    if not path.is_file():
        path = folder / "original" / "timeseries.csv"
    if not path.is_file():
        return None
    found = pd.read_csv(path).rename(columns={old: new for new, old in COLUMNS.items()})
    if not (found["kv_cache_pct"] > 0).any():
        return None
    hits = found["prefix_hit_pct"] / 100 if "prefix_hit_pct" in found else 0.0
    found = found.assign(
        prompt=found["prompt_tok_per_s"],
        output=found["gen_tok_per_s"],
        usage=found["kv_cache_pct"] / 100,
        hits=hits,
    )
    gap = found["t_s"].diff().median()
    if gap < STATS_INTERVAL_S:  # a line covers the previous ten seconds
        many = round(STATS_INTERVAL_S / gap)
        idle = found.iloc[[-1] * (many - len(found) % many)].assign(
            prompt=0.0, output=0.0, running=0, waiting=0, usage=0.0
        )
        found = pd.concat([found, idle], ignore_index=True)
        means = found[["prompt", "output"]].rolling(many, min_periods=1).mean()
        found = found.assign(**means, t_s=gap * (found.index + 1)).iloc[many - 1 :: many]
    return found


def _of_requests(table: pd.DataFrame, tokens: int) -> pd.DataFrame:
    came = table["arrival_s"].to_numpy(np.float64)
    begun = came + table["queue_ms"].to_numpy(np.float64) / 1e3
    first = came + table["ttft_ms"].to_numpy(np.float64) / 1e3
    end = came + table["e2e_ms"].to_numpy(np.float64) / 1e3
    prompt, output = table["prompt_tokens"].to_numpy(), table["output_tokens"].to_numpy()
    rows = []
    before = np.zeros(len(table))
    for at in np.arange(STATS_INTERVAL_S, end.max() + 2 * STATS_INTERVAL_S, STATS_INTERVAL_S):
        runs = (begun <= at) & (at < end)
        share = np.clip((at - first) / np.maximum(end - first, 1e-9), 0.0, 1.0)
        emitted = np.where(at >= first, np.maximum(share * output, 1.0), 0.0)
        fresh = (first > at - STATS_INTERVAL_S) & (first <= at)
        held = np.where(runs, prompt + emitted, 0.0).sum()
        rows.append(
            {
                "t_s": at,
                "prompt": prompt[fresh].sum() / STATS_INTERVAL_S,
                "output": (emitted - before).sum() / STATS_INTERVAL_S,
                "running": int(runs.sum()),
                "waiting": int(((came <= at) & (at < begun)).sum()),
                "usage": held / tokens,
                "hits": 0.0,
            }
        )
        before = emitted
    return pd.DataFrame(rows)
