"""Convert incidents to server logs and diagnose them in a separate process.

python -m benchmarks.diagnose_held_out [--fresh] [NAME…]

The set consists of the packaged incidents of vLLM and SGLang, eight further incidents, and five
healthy servers. The diagnosis gets only a folder with logs, spans or client results. It is correct
if the cause and the first suggested fix are correct or, for a healthy server, if it reports no
fault.

The rule for a correct answer is based on the cause documented in the public thread of the incident,
or on the setting that causes the incident; a comment at each incident gives the reason. The rules
were written before the answers were read. If an answer does not match, the diagnosis must be
changed and not the rule. ``--fresh`` uses the set in ``fresh_incidents`` instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkv.incident.emit.emitted_files import emit
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.packaged_scenarios import find_scenario
from simkv.scenario.scenario_loader import load, resolve_variants
from simkv.scenario.yaml_document import YamlDocument

SCENARIOS = Path(__file__).parents[1] / "scenarios"
HEALTHY = "Result: healthy"


@dataclass(frozen=True)
class HeldOutIncident:
    """A server, the files that it writes, and the rule for a correct answer.

    ``source`` is a packaged incident with its ``variant``, or a scenario. ``cause`` has regular
    expressions, all of which the ``Cause:`` line must match. The first fix in the ``Fix:`` line
    must contain one of ``fixes``. For a healthy server, ``cause`` and ``fixes`` are empty.
    """

    name: str
    source: str | dict[str, Any]
    variant: str
    kinds: tuple[str, ...]
    cause: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()


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
    """Return a workload with a few prompts without cached prefixes among many prompts with a shared
    prefix.
    """
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
#: Words for the loss of computed tokens: vLLM preempts requests, SGLang retracts them.
PREEMPTED = r"preempt|retract"
KV_CACHE = r"kv|cache|blocks"
INCIDENTS = (
    HeldOutIncident(
        # vLLM 31731: the request at the head needs more KV blocks than are free, and the requests
        # behind it wait although they would fit. The fix is to skip it (pull request 33499).
        "heavy head",
        "vllm-31731-heavy-head",
        "before",
        VLLM,
        (KV_CACHE, r"\bhead\b|head-of-line|\bbehind\b|blocked by"),
        ("skip-blocked",),
    ),
    HeldOutIncident(
        # vLLM 37307: a prompt is admitted for its first chunk and preempted later, and its work is
        # repeated. The fix is to admit a prompt only if all of it fits.
        "partial admission",
        "vllm-37307-partial-admission",
        "before",
        (*VLLM, "vllm-log-iterations"),
        (PREEMPTED, r"recompute|discard|again"),
        ("--scheduler-reserve-full-isl",),
    ),
    HeldOutIncident(
        # vLLM 39734: a prompt needs more blocks than the cache has and waits forever. Either a
        # smaller max_model_len must reject it, or a larger cache must hold it.
        "larger than the cache",
        "vllm-39734-larger-than-cache",
        "before",
        ("vllm-log", "vllm-log-requests", "otel", "bench"),
        (r"(larger|more|longer|greater) .*than|exceed|never fit|can run none", KV_CACHE),
        ("--max-model-len", "--num-gpu-blocks"),
    ),
    HeldOutIncident(
        # vLLM 44594: the cache is too small for the outputs of all admitted requests, which causes
        # preemptions. The fix is admission that keeps a part of the cache free.
        "watermark",
        "vllm-44594-watermark",
        "off",
        VLLM,
        (PREEMPTED, KV_CACHE),
        ("--watermark",),
    ),
    HeldOutIncident(
        # SGLang 30743: the server crashes with "Prefill out of memory" at the next chunk of a
        # prompt, because decodes have used memory that was not reserved for their outputs.
        "chunk out of memory",
        "sglang-30743-chunk-oom",
        "before",
        SGLANG,
        (r"out of memory|died|crash", r"prefill|chunk"),
        ("without --enable-mixed-chunk", "--schedule-conservativeness"),
    ),
    HeldOutIncident(
        # SGLang 31954: longest-prefix-match sorts uncached requests behind all cached requests. The
        # thread suggests another order or aging, and does not mention the number of slots.
        "cold prefix",
        "sglang-31954-lpm-cold",
        "before",
        SGLANG,
        (r"lpm|longest.prefix|prefix|schedule.policy", r"starv|behind|overtak|bypass|ahead"),
        ("--schedule-policy", "lpm-aging"),
    ),
    HeldOutIncident(
        # SGLang 32549: prefills have priority, and running requests get no tokens during prefills.
        "decodes starved",
        "sglang-32549-decode-starved",
        "before",
        SGLANG,
        (r"prefill", r"delay|stall|priority|interrupt|decodes? wait"),
        ("--prefill-decode-interval",),
    ),
    HeldOutIncident(
        # SGLang 32911: with fcfs, cheap requests wait behind expensive ones.
        "response ratio",
        "sglang-32911-hrrn",
        "fcfs",
        SGLANG,
        (r"\bbehind\b|fcfs|order of the queue|head-of-line",),
        ("--schedule-policy hrrn",),
    ),
    HeldOutIncident(
        # The setting: max_num_seqs=4.
        "too few seats",
        _load({"max_num_seqs": 4}, 3.0, 300, 150),
        "run",
        VLLM,
        (r"slots?\b|max.num.seqs",),
        ("--max-num-seqs",),
    ),
    HeldOutIncident(
        # The setting: a prompt gets at most 16 tokens per step.
        "small chunks",
        _load({"long_prefill_token_threshold": 16}, 2.0, 2000, 50),
        "run",
        VLLM,
        (r"prefill", r"chunk|tokens (per|a) step|long.prefill.token.threshold"),
        ("--long-prefill-token-threshold",),
    ),
    # The next six were written before the log reader had been tried on similar incidents;
    # docs/diagnose.md has their first results.
    HeldOutIncident(
        # The setting: a cache for few prompts, in a version that admits a prompt for its first
        # chunk only (see partial admission) and recomputes preempted prompts completely.
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
        (PREEMPTED, r"recompute|discard|again"),
        ("vllm 0.", "--enable-prefix-caching"),
    ),
    HeldOutIncident(
        # The setting: new prompts are admitted in only one of 64 steps.
        "rare prefills",
        _load({"prefill_schedule_interval": 64}, 3.0, 500, 150),
        "run",
        VLLM,
        (r"prefill.schedule.interval|scheduling rule|every 64|64 steps|of 64",),
        ("--prefill-schedule-interval",),
    ),
    HeldOutIncident(
        # The setting: admission keeps 60 % of the cache free.
        "too much kept free",
        _load({"watermark": 0.6, "num_gpu_blocks": 700, "max_model_len": 4096}, 4.0, 500, 150),
        "run",
        VLLM,
        (r"watermark|reserv|(left|kept) free", KV_CACHE),
        ("--watermark",),
    ),
    HeldOutIncident(
        # The settings: two slots, and longest-prefix-match, which prefers cached requests.
        "a cold one among many",
        _cold(),
        "run",
        SGLANG,
        (r"lpm|longest.prefix|prefix|schedule.policy", r"starv|behind|overtak|bypass|ahead"),
        ("--schedule-policy", "--max-running-requests", "lpm-aging"),
    ),
    HeldOutIncident(
        # The setting: almost no memory is reserved for outputs, and requests are retracted.
        "promises too small",
        _load(
            SG | {"max_total_num_tokens": 16000, "schedule_conservativeness": 0.05},
            6.0,
            300,
            600,
        ),
        "run",
        SGLANG,
        (PREEMPTED, KV_CACHE + "|memory|tokens"),
        ("--schedule-conservativeness", "--max-running-requests"),
    ),
    HeldOutIncident(
        # The setting: the scheduler receives new requests every 200 steps.
        "seldom received",
        _load(SG | {"scheduler_recv_interval": 200}, 3.0, 300, 150),
        "run",
        SGLANG,
        (r"receiv|recv.interval|not yet seen|not read",),
        ("--scheduler-recv-interval",),
    ),
    HeldOutIncident("healthy: 0.33", _load({}, 2.0, 300, 100), "run", VLLM),
    HeldOutIncident(
        "healthy: 0.19, long", _load({"variant": "0.19.0"}, 0.5, 1500, 200), "run", VLLM
    ),
    HeldOutIncident("healthy: 0.11", _load({"variant": "0.11.0"}, 3.0, 200, 50), "run", VLLM),
    HeldOutIncident("healthy: SGLang", _load(SG, 1.0, 200, 100), "run", SGLANG),
    HeldOutIncident(
        "healthy: client results", _load({}, 2.0, 300, 100), "run", ("vllm-log", "bench")
    ),
)


def main() -> None:
    """Diagnose all incidents, or the named ones; print the results and the number of correct
    answers.
    """
    right, named, incidents = 0, [one for one in sys.argv[1:] if one != "--fresh"], INCIDENTS
    if "--fresh" in sys.argv[1:]:
        from benchmarks.fresh_incidents import INCIDENTS as incidents
    chosen = [one for one in incidents if not named or one.name in named]
    for server in chosen:
        good, said = diagnosed(server)
        right += good
        print(f"{'right' if good else 'WRONG':<6}{server.name}: {said}", flush=True)
    print(f"{right} of {len(chosen)} right")


def diagnosed(server: HeldOutIncident) -> tuple[bool, str]:
    """Return whether the answer is correct, and its cause and fix as text."""
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
    lines = _answer(ran.stdout)
    if len(lines) < 5:
        return False, (ran.stdout + ran.stderr).strip()[-200:]
    return is_correct(server, lines), lines[0] if not server.fixes else "\n      ".join(lines[2:4])


def _answer(output: str) -> list[str]:
    """Return the five lines of the answer, which follow the triage of the log."""
    lines = output.splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("Result:")]
    return lines[starts[-1] : starts[-1] + 5] if starts else []


def is_correct(incident: HeldOutIncident, answer: Sequence[str]) -> bool:
    """Return whether the five lines of an answer match the rule of this incident."""
    if not incident.fixes:
        return answer[0].startswith(HEALTHY)
    cause, fix = answer[2], answer[3].partition(" (")[0]
    return all(re.search(one, cause, re.IGNORECASE) for one in incident.cause) and any(
        word in fix for word in incident.fixes
    )


def _without_sglang(document: dict[str, Any]) -> dict[str, Any]:
    """Remove a setting that only vLLM has if the engine is SGLang."""
    engine = document["engine"]
    if engine["name"] == "sglang":
        engine = {key: value for key, value in engine.items() if key != "num_gpu_blocks"}
    return document | {"engine": engine}


if __name__ == "__main__":
    main()
