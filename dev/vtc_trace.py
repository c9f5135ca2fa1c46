"""Read the "real" trace of the VTC paper, fit costs to the times measured under FCFS, and simulate
policies.

The data are not part of the repository. ``costs`` are fitted to the measured times under FCFS only;
runs under other policies are predictions.
"""

from __future__ import annotations

import csv
import gzip
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from scipy.optimize import minimize

from simkv.core.request import Request
from simkv.core.virtual_token_counters import OUTPUT_WEIGHT, PROMPT_WEIGHT
from simkv.costs.cost_profile import CostProfile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.vllm.config import VllmConfig
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine

#: Size of the KV pool in the paper, in tokens.
POOL = 10_000
#: Duration of the trace (s), and the window of the service gap (s).
DURATION, WINDOW = 600, 60
#: Costs are fitted to the requests that arrive before this time (s).
FITTED_UNTIL = 300
#: Units of the fitted costs: seconds per step, per prompt token, per decode, and per token of
#: context of a decode.
FEATURES = {
    "steps": 0.022,
    "prefill_tokens": 2e-4,
    "decode_seqs": 3e-4,
    "decode_context": 1.2e-6,
}


@dataclass(frozen=True)
class Served:
    """A served request: its client, its lengths in tokens, and its times in seconds."""

    client: str
    arrival: float
    prompt: int
    output: int
    first: float
    end: float


def read_measured(path: Path) -> list[Served]:
    """Read the trace with the times that were measured under FCFS."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    rows = list(csv.DictReader(text.splitlines()))
    served = []
    for row in rows:
        arrival = float(row["arrival_s"])
        first, end = (arrival + float(row[f"fcfs_{name}_s"]) for name in ("ttft", "e2e"))
        lengths = int(row["prompt_tokens"]), int(row["output_tokens"])
        served.append(Served(row["client"], arrival, *lengths, first, end))
    return sorted(served, key=lambda one: one.arrival)


def engine_config(engine: str, policy: str) -> SglangConfig | VllmConfig:
    """Return an engine with the KV pool of the paper.

    The paper's engine (S-LoRA) prefills first, decodes ten steps between two prefills, and has no
    prefix cache. It knows the output lengths, and admits a request if the memory suffices whenever
    a request ends. SGLang 0.5.20 has these rules with the settings below; later releases reserve
    memory for the sum of all outputs.
    """
    if engine == "vllm":
        blocks = POOL // 16 + 1
        return VllmConfig(
            num_gpu_blocks=blocks,
            enable_prefix_caching=False,
            policy=policy,  # type: ignore[arg-type]
        )
    return SglangConfig(
        variant="0.5.20",
        max_total_num_tokens=POOL,
        schedule_conservativeness=0.0,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        chunked_prefill_size=-1,
        prefill_decode_interval=10,
        schedule_policy=policy,  # type: ignore[arg-type]
    )


def build_costs(seconds: Sequence[float]) -> CostProfile:
    """Build a cost profile from the seconds per unit of each feature."""
    terms = [
        {"name": name, "feature": name, "seconds": float(value)}
        for name, value in zip(FEATURES, seconds, strict=True)
    ]
    return CostProfile.model_validate(
        {
            "name": "vtc-real",
            "engine": "any",
            "model": "llama-7b",
            "gpu": "A10G",
            "basis": "fitted to published figures",
            "terms": terms,
            "idle_pass_s": 0.001,
            "range": {},
            "fit": {"points": 0},
            "source": ["arXiv 2401.00588"],
        }
    )


def simulate(
    trace: Sequence[Served], costs: CostProfile, config: SglangConfig | VllmConfig
) -> list[Served]:
    """Simulate the requests of a trace, and return them with simulated times."""
    requests = [
        Request(
            id=number,
            prompt_tokens=one.prompt,
            max_tokens=one.output,
            arrival=one.arrival,
            ignore_eos=True,
            client=one.client,
            output_tokens=one.output,
        )
        for number, one in enumerate(trace)
    ]
    engine = Engine(simpy.Environment(), build_scheduler(config), SimulatedExecutor(costs))
    record = run_clients(engine, requests, None)
    served = []
    for number, one in enumerate(trace):
        life = record.requests[number]
        assert life.first_token is not None
        assert life.ended_at is not None
        times = life.first_token, life.ended_at
        served.append(Served(one.client, one.arrival, one.prompt, one.output, *times))
    return served


def fit_costs(
    measured: Sequence[Served], config: SglangConfig | VllmConfig
) -> np.ndarray[Any, Any]:
    """Fit the four costs to the measured first tokens and decode times; return seconds per unit.

    Only requests that arrive before ``FITTED_UNTIL`` are used: under FCFS, later requests are
    admitted after these requests.
    """
    measured = [one for one in measured if one.arrival < FITTED_UNTIL]
    units = np.array([*FEATURES.values()])

    def loss(logs: np.ndarray[Any, Any]) -> float:
        found = simulate(measured, build_costs((units * np.exp(logs)).tolist()), config)
        return sum(relative_errors(measured, found))

    best = minimize(
        loss,
        np.zeros(len(units)),
        method="Nelder-Mead",
        options={"maxfev": 70, "initial_simplex": _simplex(len(units)), "fatol": 1e-3},
    )
    return np.array(units * np.exp(best.x))


def _simplex(size: int) -> np.ndarray[Any, Any]:
    return np.vstack([np.zeros(size), 0.3 * np.eye(size)])


def relative_errors(measured: Sequence[Served], found: Sequence[Served]) -> tuple[float, float]:
    """Return the mean absolute errors of the time to the first token and of the decode time,
    relative to the measured mean.
    """

    def times(rows: Sequence[Served]) -> np.ndarray[Any, Any]:
        return np.array([(one.first - one.arrival, one.end - one.first) for one in rows])

    real = times(measured)
    ttft, decode = np.abs(times(found) - real).mean(axis=0) / real.mean(axis=0)
    return float(ttft), float(decode)


def limit_rate(trace: Sequence[Served], per_minute: int) -> list[Served]:
    """Return the requests that a limit on accepted requests per client and minute admits.

    A request is refused if ``per_minute`` requests of its client were accepted in the previous 60
    s.
    """
    accepted: dict[str, deque[float]] = {}
    kept = []
    for one in trace:
        recent = accepted.setdefault(one.client, deque())
        while recent and recent[0] <= one.arrival - 60:
            recent.popleft()
        if len(recent) < per_minute:
            recent.append(one.arrival)
            kept.append(one)
    return kept


def throughput(served: Sequence[Served]) -> float:
    """Return the prompt and output tokens per second until the last request ends."""
    return sum(one.prompt + one.output for one in served) / max(one.end for one in served)


def service_gaps(served: Sequence[Served]) -> np.ndarray[Any, Any]:
    """Return the service gap at each second of the trace, in weighted tokens per second.

    W(i) is the service that client i receives, and D(i) is the weight of its arriving requests,
    both in the window of 60 s around the second. The gap is the sum over clients of min(max W -
    W(i), max(D(i) - W(i), 0)): a client whose demand is served has no gap. A prompt counts at the
    time of the first token; output tokens are spread evenly from the first token to the last.
    """
    names = {name: row for row, name in enumerate(dict.fromkeys(one.client for one in served))}
    half = WINDOW // 2
    size = int(max(max(one.end for one in served), DURATION)) + half + 2
    service, demand = np.zeros((len(names), size)), np.zeros((len(names), size))
    for one in served:
        row = names[one.client]
        demand[row, int(one.arrival)] += PROMPT_WEIGHT * one.prompt + OUTPUT_WEIGHT * one.output
        service[row, int(one.first)] += PROMPT_WEIGHT * one.prompt
        times = np.linspace(one.first, one.end, one.output).astype(int)
        np.add.at(service[row], times, OUTPUT_WEIGHT)
    sums = [np.pad(np.cumsum(rows, axis=1), ((0, 0), (1, 0))) for rows in (service, demand)]
    gaps = []
    for now in range(DURATION):
        got, wanted = (
            (total[:, now + half] - total[:, max(now - half, 0)]) / WINDOW for total in sums
        )
        gaps.append(np.minimum(got.max() - got, np.maximum(wanted - got, 0)).sum())
    return np.array(gaps)
