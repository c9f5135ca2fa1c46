"""Reduce recorded runs to the data that a user would have, and diagnose them.

python -m benchmarks.diagnose_recorded_runs FOLDER [CASE…]

``FOLDER`` has cases in the format of ``simkv validate case``. For each case, the program writes
spans (queue, prefill, first token and end of every request), scrapes every 15 s, and a log that
contains only the start-up and the statistics lines. The diagnosis also gets the engine, its
version, the GPU, the model and two limits set by the operator. The program prints the errors of the
simulated means compared with the full record. It also prints the victims (the 10 % of requests with
the longest queue times) that the diagnosis reports or that the simulation alone finds. For sampled
requests, it prints whether the 90 % interval contains the true value.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.stats_log import gpu_of, lines_of_case
from simkv.incident import diagnose_stages
from simkv.incident import incident_folder as files
from simkv.incident.emit.prometheus_writer import scrape_requests
from simkv.incident.ensemble_fit import FIGURES
from simkv.incident.incident_simulation import request_times
from simkv.incident.server_setup import UserSettings
from simkv.incident.wait_summary import find_victims
from simkv.incident.workload_ensemble import interval
from simkv.scenario.scenario_loader import load
from simkv.sim.simulation import simulate_with_profile
from simkv.workload.workload_section import build_clients

BEGIN = 1.7e9
#: Requests with a queue time below this (ms) count as not waiting, because the engine admits
#: requests only between steps.
WAITED = 1.0


def main() -> None:
    """Diagnose every case from its spans and from its scrapes; print the errors."""
    root, *wanted = sys.argv[1:]
    for path in sorted(Path(root).glob("*/case.json")):
        case = json.loads(path.read_text())
        if wanted and path.parent.name not in wanted:
            continue
        table = _table(path.parent / "requests.csv")
        asked = _asked(case)
        _from_spans(path.parent.name, table, asked)
        _drawn(path.parent.name, "scrapes", {"metrics.json": scrape_requests(table)}, table, asked)
        log = lines_of_case(path.parent, case, table)
        _drawn(path.parent.name, "lines", {"vllm.log": log}, table, asked)


def _table(path: Path) -> pd.DataFrame:
    table = pd.read_csv(path)
    if "queued_s" in table:
        prefill = 1e3 * (table["first_token_s"] - table["scheduled_s"])
        table = table.assign(arrival_s=table["queued_s"], prefill_ms=prefill)
    return table.assign(t_s=table["arrival_s"] + BEGIN).sort_values("t_s", ignore_index=True)


def _asked(case: dict[str, Any]) -> UserSettings:
    engine = case["engine"]
    limits = {name: engine[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    ranks = engine.get("data_parallel", 1)
    return UserSettings("vllm", engine["version"], gpu_of(case), case["model"], 1, ranks, limits)


def _span(row: pd.Series) -> str:
    told = {
        "gen_ai.latency.time_to_first_token": row["ttft_ms"] / 1e3,
        "gen_ai.latency.e2e": row["e2e_ms"] / 1e3,
        "gen_ai.latency.time_in_queue": row["queue_ms"] / 1e3,
        "gen_ai.latency.time_in_model_prefill": row["prefill_ms"] / 1e3,
        "gen_ai.usage.prompt_tokens": float(row["prompt_tokens"]),
        "gen_ai.usage.completion_tokens": float(row["output_tokens"]),
    }
    attributes = [{"key": key, "value": {"doubleValue": value}} for key, value in told.items()]
    start = str(round(row["t_s"] * 1e9))
    span = {"name": "llm_request", "startTimeUnixNano": start, "attributes": attributes}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})


def _from_spans(name: str, table: pd.DataFrame, asked: UserSettings) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "spans.jsonl", Path(folder) / "out"
        path.write_text("".join(f"{_span(row)}\n" for _, row in table.iterrows()))
        diagnose_stages.read_stage([path], out)
        profile = diagnose_stages.calibrate_stage(out, asked)
        observed = diagnose_stages.rebuild_stage(out, asked)[0].observed.reset_index(drop=True)
        scenario = next(iter(load(out / files.SCENARIO, []).values()))
        requests = build_clients(scenario.workload, None).requests
        made = request_times(
            simulate_with_profile(scenario, profile, requests).record, profile.front_s
        )
    said = ", ".join(
        f"{key} {100 * (wanted.of(made) / wanted.of(table) - 1):+.1f} %"
        for key, wanted in FIGURES.items()
    )
    count = max(len(table) // 10, 1)
    true = set(table["queue_ms"].nlargest(count).index)
    again = set(made["queue_ms"].nlargest(count).index)
    told = set(find_victims(observed, list(again)))
    found = f"told {_f1(true, told):.2f}, simulated {_f1(true, again):.2f}"
    waited = int((table["queue_ms"] > WAITED).sum())
    print(f"{name}: spans: {said}; F1 of victims {found} ({waited} of {len(table)} ever waited)")


def _f1(true: set[int], found: set[int]) -> float:
    return 2 * len(true & found) / max(len(true) + len(found), 1)


def _drawn(
    name: str, kind: str, texts: dict[str, str], table: pd.DataFrame, asked: UserSettings
) -> None:
    """Diagnose from files without data on single requests."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        for file, text in texts.items():
            (Path(folder) / file).write_text(text)
        diagnose_stages.read_stage([Path(folder) / file for file in texts], out)
        diagnose_stages.calibrate_stage(out, asked)
        members = pd.read_csv(out / files.ENSEMBLE)
    said = []
    for key, wanted in FIGURES.items():
        true = wanted.of(table)
        low, high = interval(members[key].tolist(), members[f"{key}_observed"].mean())
        inside = "inside" if low <= true <= high else "outside"
        said.append(f"{key} {100 * (members[key].mean() / true - 1):+.1f} % ({inside})")
    print(f"{name}: {kind}: {', '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
