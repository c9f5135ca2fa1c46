"""Tests with excerpts of logs in the formats of forty public issue threads, with invented values.

The threads are the first forty usable hits of six fixed searches over issue threads (five gave 35),
in the order of the results:

1. vLLM log "Avg prompt throughput" Running Waiting requests stuck, throughput 0.0 tokens/s hang
2. vLLM GPU KV cache usage 99% preemption Waiting reqs queue grows log lines loggers.py Engine 000
3. vLLM "Prefix cache hit rate" log slow multi-turn throughput drops loggers.py Engine 000
4. SGLang "Decode batch" "#running-req" "token usage" "#queue-req" gen throughput slow
5. TensorRT-LLM trtllm-serve iteration log "num_scheduled_requests" iter print_iter_log slow
   requests
6. vLLM "Avg prompt throughput" "Running:" "Waiting:" "GPU KV cache usage" slow requests waiting

Skipped, because the hit has no line of an engine's statistics: vllm#42827, #41784, #14412, #17954,
#42317, #23444, #32262, 1Cat-vLLM#90, vime#120, TensorRT-LLM#9412, #14206, #16323; and repeated
hits. ``problem`` is the expected first finding; None means that the excerpt shows no problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.incident.log_summary import summarize_log
from simkv.incident.source_reader import read_source


def v1(
    clock: str, prompt: float, output: float, state: tuple[int, int, float], hits: float = 0.0
) -> str:
    """Return a statistics line of vLLM V1; ``state`` is running, waiting and cache usage in %."""
    return (
        f"INFO 03-04 {clock} [loggers.py:118] Engine 000: Avg prompt throughput: {prompt} "
        f"tokens/s, Avg generation throughput: {output} tokens/s, Running: {state[0]} reqs, "
        f"Waiting: {state[1]} reqs, GPU KV cache usage: {state[2]}%, Prefix cache hit rate: "
        f"{hits}%"
    )


def v0(clock: str, prompt: float, output: float, state: tuple[int, int, float]) -> str:
    """Return a statistics line of vLLM V0."""
    return (
        f"INFO 03-04 {clock} metrics.py:351] Avg prompt throughput: {prompt} tokens/s, Avg "
        f"generation throughput: {output} tokens/s, Running: {state[0]} reqs, Swapped: 0 reqs, "
        f"Pending: {state[1]} reqs, GPU KV cache usage: {state[2]}%, CPU KV cache usage: 0.0%."
    )


def decode(clock: str, running: int, queue: int, usage: float, rate: float, mark: str = ".") -> str:
    """Return a decode line of SGLang."""
    return (
        f"[2025-03-04 {clock} TP0] Decode batch{mark} #running-req: {running}, #token: 1000, "
        f"token usage: {usage:.2f}, gen throughput (token/s): {rate}, #queue-req: {queue}"
    )


API = "(APIServer pid=7) "
GET = 'INFO:     10.0.0.1:50000 - "GET /metrics HTTP/1.1" 200 OK'
POST = 'INFO:     10.0.0.1:50000 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
RECEIVED = (
    "INFO 03-04 11:00:{} [logger.py:39] Received request chatcmpl-{}: prompt: 'Hello [x] {{y}}', "
    "params: SamplingParams(n=1, max_tokens=512), prompt_token_ids: None, lora_request: None."
)
ITERATION = (
    "[03/04/2025-11:00:0{0}] [TRT-LLM] [I] iter = 19{0}, global_rank = 0, rank = 0, "
    "currank_total_requests = {1}/{1}, elapsed_time = 0.006s, timestamp = 2025-03-04 11:00:0{0}, "
    "num_scheduled_requests: {2}, states = {{'num_ctx_requests': 0, 'num_ctx_tokens': 0, "
    "'num_generation_tokens': {2}}}"
)


@dataclass(frozen=True)
class Excerpt:
    """An excerpt of a log, and the expected first finding."""

    thread: str
    lines: list[str]
    problem: str | None


EXCERPTS = [
    Excerpt(
        "intel/llm-scaler#391",
        [
            line
            for second in (32, 42, 52)
            for line in (
                API + v1(f"22:54:{second}", 0.0, 4.1, (1, 11, 71.2), 90.0),
                API + GET,
            )
        ],
        "blocked queue",
    ),
    Excerpt(
        "vllm#17972",
        [RECEIVED.format("00", "a"), RECEIVED.format("05", "b"), POST],
        None,
    ),
    Excerpt(
        "vllm#2731",
        [
            "INFO 03-04 06:36:05 llm_engine.py:921] Avg prompt throughput: 300.5 tokens/s, Avg "
            "generation throughput: 90.5 tokens/s, Max iteration time: 300.7 ms, Avg "
            "time/tok:140.4 ms, Running: 31 reqs, Swapped: 0 reqs, Pending: 99 reqs, GPU KV cache "
            "usage: 98.5%, CPU KV cache usage: 0.0%",
            "INFO 03-04 06:36:05 async_llm_engine.py:110] Finished request cmpl-0.",
            'INFO:     10.0.0.1:41834 - "POST /v1/completions HTTP/1.1" 200 OK',
        ],
        "KV cache full",
    ),
    Excerpt(
        "vllm#30599",
        [
            API + "WARNING 03-04 20:29:59 [protocol.py:112] fields were ignored: {'strict'}",
            API + v1("20:30:06", 99.8, 150.0, (1, 0, 0.4), 61.2),
            API + v1("20:30:16", 0.0, 171.0, (1, 0, 0.7), 61.2),
            API + GET,
            API + v1("20:30:26", 0.0, 170.3, (1, 0, 0.9), 61.2),
        ],
        None,
    ),
    Excerpt(
        "intel/llm-scaler#77",
        [
            v1("04:08:18", 1640.6, 3.1, (15, 13, 5.0)),
            v1("04:08:28", 1538.3, 190.8, (28, 0, 10.6)),
            v1("04:08:38", 0.0, 603.9, (28, 0, 13.1)),
            v1("04:08:48", 0.0, 588.3, (28, 0, 14.7)),
            v1("04:08:58", 0.0, 0.0, (28, 0, 14.7)),
            v1("04:09:08", 0.0, 0.0, (28, 0, 14.7)),
        ],
        "hang",
    ),
    Excerpt(
        "vllm#12314",
        [
            "INFO 03-04 18:25:07 engine.py:267] Added request chatcmpl-1.",
            v0("18:25:09", 590.5, 55.0, (2, 0, 6.4)),
            v0("18:25:14", 0.0, 80.5, (2, 0, 6.5)),
            v0("18:25:19", 0.0, 80.2, (2, 0, 6.6)),
        ],
        None,
    ),
    Excerpt(
        "vllm#16361",
        [
            v1("03:44:38", 9.8, 30.3, (0, 0, 0.1), 80.7),
            v1("03:44:48", 0.0, 0.0, (0, 0, 0.1), 80.7),
            RECEIVED.format("50", "c"),
        ],
        None,
    ),
    Excerpt(
        "vllm#2595 (lines without breaks)",
        [
            " ".join(
                "(_AsyncLLMEngine pid=9) " + v0(f"11:26:{53 + 5 * i}", 0.0, rate, (1, 0, 0.1))
                for i, rate in enumerate((70.3, 70.1))
            )
        ],
        None,
    ),
    Excerpt(
        "vllm#1734",
        [
            v0("00:12:08", 0.0, 112.2, (20, 9, 22.8)).removeprefix("INFO "),
            v0("00:12:13", 1012.4, 0.0, (21, 7, 25.1)),
            v0("00:12:18", 1076.2, 0.0, (23, 5, 28.4)),
        ],
        "prefill bound",
    ),
    Excerpt(
        "vllm#8378",
        [
            v0("16:10:53", 60.0, 0.3, (2, 0, 0.1)),
            POST,
            POST,
            v0("16:10:58", 66.6, 5.1, (0, 11, 0.0)),
            GET,
            v0("16:11:03", 0.0, 0.0, (0, 20, 0.0)),
            v0("16:11:08", 0.0, 0.0, (0, 27, 0.0)),
        ],
        "hang",
    ),
    Excerpt(
        "vllm#37307",
        [
            API + v1(f"15:38:{10 * i}0"[:8], 22990.0, 15.0 * i, (10 + 5 * i, 90 - 5 * i, 17.0 * i))
            for i in range(1, 5)
        ],
        "prefill bound",
    ),
    Excerpt(
        "vllm#18115 (two lines in one)",
        [
            v1("06:40:59", 0.0, 231.2, (8, 0, 90.2)),
            v1("06:41:09", 0.0, 231.1, (8, 0, 90.6)) + v1("06:41:19", 0.0, 232.0, (8, 0, 90.9)),
        ],
        None,
    ),
    Excerpt(
        "tenstorrent/vllm#55",
        [
            "DEBUG 03-04 06:33:36 client.py:154] Heartbeat successful.",
            v0("06:33:37", 0.0, 15.7, (15, 0, 91.1)),
            v0("06:33:43", 0.0, 15.7, (15, 0, 91.7)),
        ],
        "slow decoding",
    ),
    Excerpt(
        "vllm#21809",
        [v1(f"06:42:{i}9", 0.0, 231.8, (8, 0, 92.9 + 0.4 * i)) for i in range(5)],
        None,
    ),
    Excerpt(
        "vllm#8219",
        [
            v0("17:21:20", 300.0, 200.0, (40, 2, 97.0)),
            "ERROR 03-04 17:21:30 async_llm_engine.py:63] Engine background task failed",
        ],
        "engine died",
    ),
    Excerpt(
        "vllm#25780",
        [v1("11:20:52", 6002.8, 1121.7, (251, 500, 80.3), 30.2)],
        "queue",
    ),
    Excerpt(
        "vllm-ascend#2304",
        [
            "INFO 03-04 09:20:02 [async_llm.py:270] Added request chatcmpl-1.",
            v1("09:20:10", 35.1, 49.0, (0, 0, 0.0)),
            v1("09:20:20", 0.0, 0.0, (0, 0, 0.0)),
        ],
        None,
    ),
    Excerpt(
        "vllm#31920 (no times)",
        [
            v1("", 2.1, 2.8, (0, 0, 0.0)).partition("  ")[2],
            v1("", 0.0, 0.0, (0, 0, 0.0), 28.1).partition("  ")[2] + ", MM cache hit rate: 0.0%",
        ],
        None,
    ),
    Excerpt(
        "vllm#43447 (quoted)",
        [
            "> " + API + v1("05:04:36", 1168.9, 137.0, (6, 0, 0.7), 18.8),
            API + "INFO 03-04 05:04:36 [metrics.py:101] SpecDecoding metrics: Mean acceptance "
            "length: 1.70, Accepted throughput: 60.79 tokens/s, Drafted throughput: 70.79 tokens/s",
            API + v1("05:04:46", 2421.7, 377.4, (5, 0, 0.7), 22.6),
        ],
        None,
    ),
    Excerpt(
        "vllm-ascend#9845 (two ranks)",
        [
            API + v1(f"14:04:{s}", 0.0, 15.5, (1, 0, 6.1), 57.3).replace("000", rank)
            for s in ("04", "14")
            for rank in ("000", "001")
        ],
        None,
    ),
    Excerpt(
        "LMCache#3655",
        [
            API
            + v1("11:03:35", 226.8, 50.4, (1, 0, 26.3), 90.1)
            + ", External prefix cache hit rate: 1.1%",
            "",
            API
            + v1("11:03:45", 0.0, 53.8, (1, 0, 26.9), 90.1)
            + ", External prefix cache hit rate: 1.1%",
        ],
        None,
    ),
    Excerpt(
        "sglang#3909",
        [decode(f"04:46:{39 + 2 * i}", 8, 0, 0.12, 180.0 - i) for i in range(6)],
        None,
    ),
    Excerpt(
        "sglang#938 (no time)",
        [
            "Decode batch. #running-req: 990, #token: 54006, token usage: 0.96, gen throughput "
            "(token/s): 1297.13, #queue-req: 12079"
        ],
        "KV cache full",
    ),
    Excerpt(
        "sglang#6291",
        [
            "[2025-03-04 09:31:43] Prefill batch. #new-seq: 2, #new-token: 2, #cached-token: 8000, "
            "token usage: 0.25, #running-req: 27, #queue-req: 0",
            '[2025-03-04 09:31:43] INFO:     127.0.0.1:20504 - "POST /v1/completions HTTP/1.1" 200 '
            "OK",
            "[2025-03-04 09:31:44] Prefill batch. #new-seq: 4, #new-token: 4, #cached-token: 16000,"
            " token usage: 0.29, #running-req: 29, #queue-req: 0",
        ],
        None,
    ),
    Excerpt(
        "sglang#1270 (time without date)",
        [decode(f"04:40:{55 + i}", 2, 0, 0.0, 430.0).replace("2025-03-04 ", "") for i in range(4)],
        None,
    ),
    Excerpt(
        "sglang#1612",
        [
            "Processing batches: 0it [00:00, ?it/s]",
            "[16:43:29] Prompts loaded.",
            *(
                f"[16:43:{29 + i} TP0] Prefill batch. #new-seq: 5, #new-token: 8000, "
                f"#cached-token: 400, cache hit rate: 2.76%, token usage: {0.1 * i:.2f}, "
                f"#running-req: {4 * i}, #queue-req: {40 - 4 * i}"
                for i in range(5)
            ),
        ],
        "queue",
    ),
    Excerpt(
        "sglang-jax#564",
        [decode(f"05:10:{47 + i}", 1, 0, 0.0, 80.0 + i) + ", #cache_miss: 1" for i in range(4)],
        None,
    ),
    Excerpt(
        "OpenClaw-RL#44 (Ray)",
        [
            "(SGLangEngine pid=41820) "
            + decode(f"13:53:{37 + i}", 6, 0, 0.04, 1300.0, ",").replace(
                "gen through", "cuda graph: True, gen through"
            )
            for i in range(4)
        ],
        None,
    ),
    Excerpt(
        "sglang#22166",
        [
            decode("20:02:51", 31, 0, 0.08, 1600.1, ","),
            '[2025-03-04 20:02:51] INFO:     127.0.0.1:40052 - "POST /v1/chat/completions '
            'HTTP/1.1" 200 OK',
            "[2025-03-04 20:02:51] Prefill batch, #new-seq: 1, #new-token: 150, #cached-token: 0, "
            "token usage: 0.08, #running-req: 30, #queue-req: 0, cuda graph: True, input "
            "throughput (token/s): 540.53",
            decode("20:02:52", 28, 0, 0.08, 1500.1, ","),
        ],
        None,
    ),
    Excerpt(
        "sglang#4407",
        [decode(f"02:16:{14 + 2 * i}", 500 - 50 * i, 0, 0.43, 7800.0) for i in range(5)],
        None,
    ),
    Excerpt(
        "triton-inference-server/tensorrtllm_backend#217",
        [
            "I0304 03:35:37.688135 20559 libtensorrtllm.cc:1205] "
            '{"Active Request Count":1,"Context Requests":1,"Free KV cache blocks":470,"Generation '
            'Requests":0,"Iteration Counter":0,"Max KV cache blocks":503,"Scheduled Requests":1,'
            '"Timestamp":"03-04-2023 03:35:37","Tokens per KV cache block":64,"Total Context '
            'Tokens":2000,"Used KV cache blocks":1}'
        ],
        None,
    ),
    Excerpt(
        "TensorRT-LLM#3914",
        [ITERATION.format(i, 10, 10) for i in range(4)],
        None,
    ),
    Excerpt(
        "TensorRT-LLM#431",
        [
            "I0304 02:29:01.795279 42888 libtensorrtllm.cc:1009] "
            '{"Active Request Count":1,"Iteration Counter":190,"Timestamp":"03-04-2023 02:29:01"}'
        ],
        None,
    ),
    Excerpt(
        "vllm#31193 (iterations)",
        [
            f"(EngineCore_DP0 pid=9) INFO 03-04 21:44:4{i} [core.py:349] Iteration(51{i}): 0 "
            "context requests, 0 context tokens, 19 generation requests, 19 generation tokens, "
            "iteration elapsed time: 10.79 ms"
            for i in range(3)
        ],
        None,
    ),
    Excerpt(
        "TensorRT-LLM#14734",
        [ITERATION.format(1, 1, 1).replace(", states", ", cached_kv_len = 0, states")],
        None,
    ),
    Excerpt(
        "TensorRT-LLM#9778 (proposed lines)",
        [
            "[2025-03-04 10:00:00] Prefill batch. #new-seq: 1, #new-token: 24, #cached-token: 1, "
            "token usage: 0.00, #running-req: 0, #queue-req: 0",
            decode("10:00:02", 1, 0, 0.0, 101.3).replace(" TP0", ""),
        ],
        None,
    ),
    Excerpt(
        "triton-inference-server/tensorrtllm_backend#609",
        [
            "I0304 23:45:42.282246 136 model_instance_state.cc:1115] "
            '"{\\"Active Request Count\\":7,\\"Iteration Counter\\":6000,\\"Max Request Count\\":7,'
            '\\"Scheduled Requests\\":1}"'
        ],
        "queue",
    ),
    Excerpt(
        "vllm#2136",
        [
            RECEIVED.format("59", "d"),
            v0("11:00:59", 0.0, 0.1, (1, 0, 0.1)),
            v0("11:01:04", 0.0, 11.0, (1, 0, 0.3)),
        ],
        None,
    ),
    Excerpt(
        "vllm#43295",
        [
            API + v1("10:13:11", 0.0, 1005.3, (17, 41, 95.1)),
            API + v1("10:13:21", 0.0, 1126.3, (17, 40, 95.3)),
            API + v1("10:13:31", 11068.8, 704.9, (17, 31, 85.7)),
        ],
        "KV cache full",
    ),
    Excerpt(
        "vllm#15018",
        [v0(f"09:04:{46 + 3 * i}", 0.0, 0.5, (2, 0, 0.7)) for i in range(4)],
        "slow decoding",
    ),
]


def write(tmp_path: Path, excerpt: Excerpt) -> Path:
    path = tmp_path / "excerpt.log"
    path.write_text("".join(f"{line}\n" for line in excerpt.lines))
    return path


def test_covers_forty_threads() -> None:
    assert len({excerpt.thread for excerpt in EXCERPTS}) == 40


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda one: one.thread)
def test_excerpt_gets_a_summary_that_names_its_problem(tmp_path: Path, excerpt: Excerpt) -> None:
    path = write(tmp_path, excerpt)
    summary = summarize_log(read_source(path))
    assert summary is not None
    names = [finding.name for finding in summary.problems]
    assert names[:1] == ([excerpt.problem] if excerpt.problem else [])


ANSWERED = ("intel/llm-scaler#391", "sglang#3909", "vllm#12314")


@pytest.mark.parametrize(
    "excerpt", [one for one in EXCERPTS if one.thread in ANSWERED], ids=lambda one: one.thread
)
def test_command_answers_with_measured_figures(tmp_path: Path, excerpt: Excerpt) -> None:
    out = tmp_path / "out"
    found = CliRunner().invoke(app, ["diagnose", str(write(tmp_path, excerpt)), "--out", str(out)])
    assert found.exit_code == (3 if excerpt.problem else 0), found.output
    assert "all metrics are measured" in (out / "diagnosis.md").read_text()
