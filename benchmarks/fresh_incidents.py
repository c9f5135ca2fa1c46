"""A second set of held-out incidents, with other engines, loads and seeds than in the first set.

python -m benchmarks.diagnose_held_out --fresh [NAME…]

The set was committed before any of its servers was diagnosed; docs/diagnose.md has the result of
that first run. A rule is based on the setting that was changed in the server. It accepts every flag
that, according to the engine's documentation, reverses the effect of this setting.
"""

from __future__ import annotations

from typing import Any

from benchmarks.diagnose_held_out import KV_CACHE, PREEMPTED, HeldOutIncident

ACCESS, LINES, SGLANG = ("vllm-log-access",), ("vllm-log",), ("sglang-log",)
CLIENT, SPANS = ("vllm-log", "bench"), ("vllm-log", "otel")
SLOTS = r"slots?\b|max.num.seqs|max.running.requests"


def _vllm(variant: str, **settings: Any) -> dict[str, Any]:
    return {"name": "vllm", "variant": variant, "num_gpu_blocks": 9000, **settings}


def _sglang(variant: str, **settings: Any) -> dict[str, Any]:
    return {"name": "sglang", "variant": variant, "max_total_num_tokens": 150_000, **settings}


def _server(
    engine: dict[str, Any], seed: int, rate: float, prompt: int, output: int, count: int
) -> dict[str, Any]:
    """Return a server with Poisson arrivals and lognormal lengths."""
    return {
        "name": "server",
        "workload": {
            "arrivals": {
                "num_prompts": count,
                "request_rate": rate,
                "prompt_tokens": {"distribution": "lognormal", "mean": prompt, "sigma": 0.5},
                "output_tokens": {"distribution": "lognormal", "mean": output, "sigma": 0.4},
                "seed": seed,
            }
        },
        "engine": engine,
        "profile": "assumed-costs.json",
    }


def _sessions(engine: dict[str, Any], seed: int, rate: float, sessions: int) -> dict[str, Any]:
    return {
        "name": "server",
        "workload": {
            "sessions": {
                "num_sessions": sessions,
                "turns": {"distribution": "uniform", "low": 4, "high": 8},
                "prompt_tokens": {"distribution": "lognormal", "mean": 900, "sigma": 0.4},
                "output_tokens": {"distribution": "lognormal", "mean": 120, "sigma": 0.4},
                "request_rate": rate,
                "think_time": 1.0,
                "seed": seed,
            }
        },
        "engine": engine,
        "profile": "assumed-costs.json",
    }


INCIDENTS = (
    HeldOutIncident(
        # The setting: max_num_seqs=6; the only file is the default log with access lines.
        "six slots, access lines",
        _server(_vllm("0.17.0", max_num_seqs=6), 101, 3.0, 400, 220, 90),
        "run",
        ACCESS,
        (SLOTS,),
        ("--max-num-seqs",),
    ),
    HeldOutIncident(
        # The setting: max_num_seqs=5, sessions with growing prompts and a high hit rate.
        "five slots for sessions",
        _sessions(_vllm("0.24.0", max_num_seqs=5), 102, 1.0, 25),
        "run",
        ACCESS,
        (SLOTS,),
        ("--max-num-seqs",),
    ),
    HeldOutIncident(
        # The setting: max_running_requests=5.
        "five slots of SGLang",
        _server(_sglang("0.5.20", max_running_requests=5), 103, 3.0, 350, 200, 70),
        "run",
        SGLANG,
        (SLOTS,),
        ("--max-running-requests",),
    ),
    HeldOutIncident(
        # The setting: a step has at most 32 tokens, so prompts take many steps.
        "small token budget",
        _server(
            _vllm("0.21.0", max_num_batched_tokens=32, max_num_seqs=32), 104, 1.5, 1500, 60, 50
        ),
        "run",
        SPANS,
        (r"max.num.batched.tokens|token budget|tokens (per|a|of a) step|prefill",),
        ("--max-num-batched-tokens",),
    ),
    HeldOutIncident(
        # The setting: a chunk of SGLang's prefill has 64 tokens.
        "small chunks of SGLang",
        _server(_sglang("0.5.23", chunked_prefill_size=64), 105, 1.4, 1500, 60, 50),
        "run",
        SGLANG,
        (r"chunk|prefill",),
        ("--chunked-prefill-size",),
    ),
    HeldOutIncident(
        # The setting: a cache for about five requests; no queue limit causes the problem. vLLM
        # preempts requests, because outputs are long. More blocks, or fewer requests at a time, fix
        # it.
        "cache for five requests",
        _server(_vllm("0.19.0", num_gpu_blocks=220, max_model_len=3000), 106, 1.5, 400, 350, 50),
        "run",
        CLIENT,
        (KV_CACHE,),
        ("--num-gpu-blocks", "--max-num-seqs", "--gpu-memory-utilization", "larger cache"),
    ),
    HeldOutIncident(
        # The setting: a cache for few requests; only the statistics and access lines show it.
        "small cache, access lines",
        _server(_vllm("0.28.0", num_gpu_blocks=170, max_model_len=2400), 107, 3.0, 600, 150, 90),
        "run",
        ACCESS,
        (KV_CACHE,),
        ("--num-gpu-blocks", "--max-num-seqs", "--gpu-memory-utilization", "larger cache"),
    ),
    HeldOutIncident(
        # The setting: conversations without prefix caching, so that every prompt is computed again.
        "no prefix caching",
        _sessions(_vllm("0.30.0", enable_prefix_caching=False), 108, 2.5, 25),
        "run",
        SPANS,
        (r"prefix|prefill|prompt",),
        ("--enable-prefix-caching",),
    ),
    HeldOutIncident(
        # The setting: a pool of 3,000 tokens, enough for about four requests.
        "small pool of SGLang",
        _server(_sglang("0.5.22", max_total_num_tokens=3_000), 109, 3.0, 500, 150, 70),
        "run",
        SGLANG,
        (KV_CACHE + "|memory|tokens",),
        ("--max-total-tokens", "--mem-fraction-static", "larger cache"),
    ),
    HeldOutIncident(
        # The setting: the watermark keeps half of the cache free.
        "half of the cache free",
        _server(
            _vllm("0.33.0", watermark=0.5, num_gpu_blocks=400, max_model_len=3000),
            110,
            2.5,
            500,
            150,
            80,
        ),
        "run",
        SPANS,
        (r"watermark|reserv|(left|kept) free", KV_CACHE),
        ("--watermark",),
    ),
    HeldOutIncident(
        # The setting: prefills run in only one of 80 steps.
        "prefill every 80 steps",
        _server(_vllm("0.33.0", prefill_schedule_interval=80), 111, 2.0, 700, 100, 60),
        "run",
        CLIENT,
        (r"prefill.schedule.interval|scheduling rule|every 80|80 steps|of 80",),
        ("--prefill-schedule-interval",),
    ),
    HeldOutIncident(
        # The setting: SGLang's scheduler receives new requests in only one of 150 steps.
        "requests read seldom",
        _server(_sglang("0.5.23", scheduler_recv_interval=150), 112, 2.0, 500, 120, 60),
        "run",
        SGLANG,
        (r"receiv|recv.interval|not yet seen|not read",),
        ("--scheduler-recv-interval",),
    ),
    HeldOutIncident(
        # The setting: almost no memory is reserved for outputs, so requests are retracted. A higher
        # conservativeness or fewer running requests fix it.
        "outputs not reserved",
        _server(
            _sglang("0.5.20", max_total_num_tokens=9_000, schedule_conservativeness=0.02),
            113,
            4.0,
            200,
            700,
            60,
        ),
        "run",
        SGLANG,
        (PREEMPTED,),
        ("--schedule-conservativeness", "--max-running-requests"),
    ),
    HeldOutIncident(
        "healthy: access lines", _server(_vllm("0.23.0"), 114, 1.5, 500, 120, 60), "run", ACCESS
    ),
    HeldOutIncident("healthy: sessions", _sessions(_vllm("0.27.0"), 115, 0.6, 15), "run", ACCESS),
    HeldOutIncident(
        "healthy: SGLang 0.5.20", _server(_sglang("0.5.20"), 116, 1.5, 400, 80, 50), "run", SGLANG
    ),
)
