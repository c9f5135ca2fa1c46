"""Simulate runs with costs that the diagnosis does not know, and diagnose them from the files of
their servers.

python -m benchmarks.diagnose_synthetic [NAME…]

The step costs are composed from the operator times of a GPU and a model (extra ``hardware``), while
the diagnosis fits another form of cost model. The diagnosis is a separate process that gets a
folder with files, but neither GPU nor model. For each run, the program prints the error of the
simulated means and, for sampled requests, whether the 90 % interval contains the true value. This
is done for four kinds of input: spans; spans and a log with iterations; such a log alone; and a log
with only statistics lines.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.costs.cost_profile import load_profile
from simkv.incident import incident_folder as files
from simkv.incident.emit.emitted_files import emit
from simkv.incident.ensemble_fit import FIGURES
from simkv.incident.incident_simulation import request_times
from simkv.incident.workload_ensemble import interval
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import load, resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from simkv.sim.simulation import simulate_with_profile
from simkv.workload.workload_section import build_clients

HERE = Path(__file__).parent


def _run(
    hardware: dict[str, Any],
    engine: dict[str, Any],
    rate: float,
    prompt: int,
    output: int,
    burst: float = 1.0,
) -> dict[str, Any]:
    return {
        "name": "planted",
        "workload": {
            "arrivals": {
                "num_prompts": 240,
                "request_rate": rate,
                "burstiness": burst,
                "prompt_tokens": {
                    "distribution": "lognormal",
                    "mean": prompt,
                    "sigma": 0.8,
                    "max": 6000,
                },
                "output_tokens": {
                    "distribution": "lognormal",
                    "mean": output,
                    "sigma": 0.6,
                    "max": 1500,
                },
                "seed": 11,
            }
        },
        "hardware": hardware,
        "engine": engine,
    }


H100 = {"gpu": "H100-SXM", "model": "llama-3.1-8b"}
L4 = {"gpu": "L4", "model": "qwen3-8b"}
LARGE = {"gpu": "H100-SXM", "model": "llama-3.1-70b", "tp": 4}


def _vllm(variant: str, **knobs: Any) -> dict[str, Any]:
    sizes = {"num_gpu_blocks": 1024, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    return {"name": "vllm", "variant": variant, "max_model_len": 8192, **sizes, **knobs}


#: The run, and the engine that writes its log.
RUNS = {
    "light": _run(H100, _vllm("0.33.0"), 4.0, 900, 250),
    "small cache": _run(H100, _vllm("0.19.0", num_gpu_blocks=2000), 12.0, 900, 250),
    "few seats": _run(H100, _vllm("0.27.0", max_num_seqs=24), 9.0, 600, 300),
    "long prompts": _run(LARGE, _vllm("0.33.0", num_gpu_blocks=6000), 3.0, 2500, 150, 0.3),
    "L4": _run(L4, _vllm("0.24.0", num_gpu_blocks=3000), 0.8, 700, 200),
}
#: Inputs of the diagnosis: the kinds of files that are written, and their sources.
GIVEN = {
    "spans": ("vllm-log", "otel"),
    "spans, iterations": ("vllm-log-iterations", "otel"),
    "iterations": ("vllm-log-iterations",),
    "stats lines": ("vllm-log",),
}


def main() -> None:
    """Diagnose all runs, or the named ones, from each kind of input; print the errors."""
    wanted = [name for name in sys.argv[1:] if name in RUNS] or list(RUNS)
    for name in wanted:
        scenario = next(
            iter(resolve_variants(YamlDocument(HERE / "planted.yaml", RUNS[name])).values())
        )
        result = run_scenario(scenario, HERE, intervals=False)
        for given, kinds in GIVEN.items():
            print(f"{name}: {given}: {_diagnosed(result, kinds)}", flush=True)


def _diagnosed(result: RunResult, kinds: tuple[str, ...]) -> str:
    true = request_times(result.record)
    with tempfile.TemporaryDirectory() as folder:
        written = emit(Path(folder), {"server": result}, kinds)
        out = Path(folder) / "answer"
        command = [sys.executable, "-m", "simkv", "diagnose", *(path.name for path in written)]
        ran = subprocess.run(
            [*command, "--until", "3", "--out", str(out)],
            cwd=written[0].parent,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            return (ran.stdout + ran.stderr).strip()[-300:]
        if (out / files.ENSEMBLE).is_file():
            return _of_members(pd.read_csv(out / files.ENSEMBLE), true)
        profile = load_profile(files.PROFILE, out)
        scenario = next(iter(load(out / files.SCENARIO, []).values()))
        requests = build_clients(scenario.workload, None).requests
        made = request_times(
            simulate_with_profile(scenario, profile, requests).record, profile.front_s
        )
    return ", ".join(
        f"{key} {100 * (wanted.of(made) / wanted.of(true) - 1):+.1f} %"
        for key, wanted in FIGURES.items()
    )


def _of_members(members: pd.DataFrame, true: pd.DataFrame) -> str:
    said = []
    for key, wanted in FIGURES.items():
        low, high = interval(members[key].tolist(), members[f"{key}_observed"].mean())
        inside = "inside" if low <= wanted.of(true) <= high else "outside"
        said.append(f"{key} {100 * (members[key].mean() / wanted.of(true) - 1):+.1f} % ({inside})")
    return ", ".join(said)


if __name__ == "__main__":
    main()
