"""Convert incidents to server logs and diagnose them in a separate process.

    python -m benchmarks.diagnose_held_out [NAME…]

The incidents are the packaged ones of vLLM and SGLang, two more, and five healthy servers. The
diagnosis has only a folder with logs, spans or client results. It is correct if the cause and the
first suggested fix are right; for a healthy server, if no fault is reported.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkv.incident.emit.emitted_files import emit
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.packaged_scenarios import find_scenario
from simkv.scenario.scenario_loader import load, resolve_variants
from simkv.scenario.yaml_document import YamlDocument

SCENARIOS = Path(__file__).parents[1] / "scenarios"
WELL = "Result: healthy"


@dataclass(frozen=True)
class Blind:
    """A server: a packaged incident with its variant or a document, the files that it writes, and
    accepted words of the cause and the fix."""

    name: str
    source: str | dict[str, Any]
    variant: str
    kinds: tuple[str, ...]
    causes: tuple[str, ...]
    remedies: tuple[str, ...]


def _load(
    engine: dict[str, Any], rate: float, prompt: Any, output: int, count: int = 60
) -> dict[str, Any]:
    if isinstance(prompt, int):
        prompt = {"distribution": "lognormal", "mean": prompt, "sigma": 0.6}
    return {
        "name": "server",
        "workload": {
            "arrivals": {
                "num_prompts": count,
                "request_rate": rate,
                "prompt_tokens": prompt,
                "output_tokens": {"distribution": "lognormal", "mean": output, "sigma": 0.5},
                "seed": 7,
            }
        },
        "engine": {"name": "vllm", "variant": "0.33.0", "num_gpu_blocks": 8000} | engine,
        "profile": "assumed-costs.json",
    }


def _cold() -> dict[str, Any]:
    """Return a few prompts without cached prefixes among many with a shared prefix."""
    warm = [
        {"prompt_tokens": 1000, "output_tokens": 20, "arrival": 0.12 * i, "prefix_group": "warm"}
        | {"prefix_tokens": 960}
        for i in range(150)
    ]
    cold = [
        {"prompt_tokens": 1500, "output_tokens": 20, "arrival": 1.0 + 3.0 * i} for i in range(4)
    ]
    return {
        "name": "server",
        "workload": {"requests": [*warm, *cold]},
        "engine": SG | {"schedule_policy": "lpm", "max_running_requests": 2},
        "profile": "assumed-costs.json",
        "timeout": 6,
    }


VLLM, SGLANG = ("vllm-log", "otel"), ("sglang-log",)
SG = {"name": "sglang", "variant": "0.5.23", "max_total_num_tokens": 128000}
SERVERS = (
    Blind(
        "heavy head",
        "vllm-31731-heavy-head",
        "before",
        VLLM,
        ("head-of-line", "too few free KV blocks for the next request"),
        ("skip-blocked",),
    ),
    Blind(
        "partial admission",
        "vllm-37307-partial-admission",
        "before",
        (*VLLM, "vllm-log-iterations"),
        ("thrash", "forced the engine to recompute"),
        ("--scheduler-reserve-full-isl",),
    ),
    Blind(
        "larger than the cache",
        "vllm-39734-larger-than-cache",
        "before",
        ("vllm-log", "vllm-log-requests", "otel", "bench"),
        ("deadlock", "the scheduler can run none of them"),
        ("--max-model-len", "--num-gpu-blocks"),
    ),
    Blind(
        "watermark",
        "vllm-44594-watermark",
        "off",
        VLLM,
        ("thrash", "forced the engine to recompute", "blocks"),
        ("--watermark",),
    ),
    Blind(
        "chunk out of memory",
        "sglang-30743-chunk-oom",
        "before",
        SGLANG,
        ("engine died", "out of memory"),
        ("without --enable-mixed-chunk", "--schedule-conservativeness"),
    ),
    Blind(
        "cold prefix",
        "sglang-31954-lpm-cold",
        "before",
        SGLANG,
        ("starvation", "slots busy"),
        ("--schedule-policy", "--max-running-requests", "lpm-aging"),
    ),
    Blind(
        "decodes starved",
        "sglang-32549-decode-starved",
        "before",
        SGLANG,
        ("delayed by prefill of others",),
        ("--prefill-decode-interval",),
    ),
    Blind(
        "response ratio",
        "sglang-32911-hrrn",
        "fcfs",
        SGLANG,
        ("behind the head", "slot"),
        ("--schedule-policy hrrn",),
    ),
    Blind(
        "too few seats",
        _load({"max_num_seqs": 4}, 3.0, 300, 150),
        "run",
        VLLM,
        ("slot", "behind the head"),
        ("--max-num-seqs",),
    ),
    Blind(
        "small chunks",
        _load({"long_prefill_token_threshold": 16}, 2.0, 2000, 50),
        "run",
        VLLM,
        ("while they prefill",),
        ("--long-prefill-token-threshold",),
    ),
    # The next six were written before the reader had processed similar incidents;
    # docs/diagnose.md has their first results.
    Blind(
        "chunks thrown away",
        _load(
            {"variant": "0.14.0", "num_gpu_blocks": 1300, "enable_prefix_caching": False},
            0.8,
            {"distribution": "uniform", "low": 2500, "high": 7500},
            250,
            40,
        ),
        "run",
        VLLM,
        ("thrash", "forced the engine to recompute"),
        ("vllm 0.", "--enable-prefix-caching"),
    ),
    Blind(
        "rare prefills",
        _load({"prefill_schedule_interval": 64}, 3.0, 500, 150),
        "run",
        VLLM,
        ("excluded by a scheduling rule", "behind the head"),
        ("--prefill-schedule-interval",),
    ),
    Blind(
        "too much kept free",
        _load({"watermark": 0.6, "num_gpu_blocks": 700, "max_model_len": 4096}, 4.0, 500, 150),
        "run",
        VLLM,
        ("blocks", "behind the head", "head-of-line"),
        ("--watermark",),
    ),
    Blind(
        "a cold one among many",
        _cold(),
        "run",
        SGLANG,
        ("starvation", "slots busy"),
        ("--schedule-policy", "--max-running-requests", "lpm-aging"),
    ),
    Blind(
        "promises too small",
        _load(
            SG | {"max_total_num_tokens": 16000, "schedule_conservativeness": 0.05},
            6.0,
            300,
            600,
        ),
        "run",
        SGLANG,
        ("thrash", "preempt", "blocks", "behind the head"),
        ("--schedule-conservativeness", "--max-running-requests"),
    ),
    Blind(
        "seldom received",
        _load(SG | {"scheduler_recv_interval": 200}, 3.0, 300, 150),
        "run",
        SGLANG,
        ("not yet seen by scheduler", "behind the head"),
        ("--scheduler-recv-interval",),
    ),
    Blind("well: 0.33", _load({}, 2.0, 300, 100), "run", VLLM, (), (WELL,)),
    Blind(
        "well: 0.19, long", _load({"variant": "0.19.0"}, 0.5, 1500, 200), "run", VLLM, (), (WELL,)
    ),
    Blind("well: 0.11", _load({"variant": "0.11.0"}, 3.0, 200, 50), "run", VLLM, (), (WELL,)),
    Blind("well: SGLang", _load(SG, 1.0, 200, 100), "run", SGLANG, (), (WELL,)),
    Blind("well: a client", _load({}, 2.0, 300, 100), "run", ("vllm-log", "bench"), (), (WELL,)),
)


def main() -> None:
    """Diagnose all incidents, or the named ones, and print the results and the number of correct
    ones."""
    right = 0
    chosen = [one for one in SERVERS if not sys.argv[1:] or one.name in sys.argv[1:]]
    for server in chosen:
        good, said = diagnosed(server)
        right += good
        print(f"{'right' if good else 'WRONG':<6}{server.name}: {said}", flush=True)
    print(f"{right} of {len(chosen)} right")


def diagnosed(server: Blind) -> tuple[bool, str]:
    """Return whether the answer is correct, with its cause and fix."""
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(server.source, str):
            path = find_scenario(Path(server.source))
            scenario = load(path, [])[server.variant]
        else:
            path = SCENARIOS / "server.yaml"
            scenario = next(
                iter(resolve_variants(YamlDocument(path, _without_sglang(server.source))).values())
            )
        result = run_scenario(scenario, path.parent, intervals=False)
        files = emit(Path(folder), {"server": result}, server.kinds)
        command = [sys.executable, "-m", "simkv", "diagnose", *(file.name for file in files)]
        ran = subprocess.run(
            [*command, "--out", "../answer"],
            cwd=files[0].parent,
            capture_output=True,
            text=True,
            check=False,
        )
    lines = ran.stdout.splitlines()
    if len(lines) < 5:
        return False, (ran.stdout + ran.stderr).strip()[-200:]
    if server.remedies == (WELL,):
        return lines[0].startswith(WELL), lines[0]
    cause, remedy = lines[2], lines[3].partition(" (")[0]
    good = any(word in cause for word in server.causes) and any(
        word in remedy for word in server.remedies
    )
    return good, f"{cause[:90]} | {remedy[:90]}"


def _without_sglang(document: dict[str, Any]) -> dict[str, Any]:
    """Remove vLLM's own setting if the engine is SGLang."""
    engine = document["engine"]
    if engine["name"] == "sglang":
        engine = {key: value for key, value in engine.items() if key != "num_gpu_blocks"}
    return document | {"engine": engine}


if __name__ == "__main__":
    main()
