"""Tests of vLLM's log: lines of real servers, quoted in public issues, and other lines in a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.incident.evidence import Evidence
from simkv.incident.source_reader import read_source

#: Lines of real servers: the issue or pull request, the line, running, waiting, usage, hit rate.
QUOTED = [
    (
        "vllm-project/vllm#37307",
        "(APIServer pid=11574) INFO 03-17 15:38:10 [loggers.py:259] Engine 000: Avg prompt "
        "throughput: 23998.2 tokens/s, Avg generation throughput: 18.1 tokens/s, Running: 10 reqs, "
        "Waiting: 90 reqs, GPU KV cache usage: 19.3%, Prefix cache hit rate: 0.0%",
        (10, 90, 0.193, 0.0),
    ),
    (
        "vllm-project/vllm#21809",
        "INFO 07-28 06:42:09 [loggers.py:118] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg "
        "generation throughput: 240.8 tokens/s, Running: 8 reqs, Waiting: 0 reqs, GPU KV cache "
        "usage: 93.9%, Prefix cache hit rate: 0.0%",
        (8, 0, 0.939, 0.0),
    ),
    (
        "intel/llm-scaler#391",
        "(APIServer pid=851) INFO 04-28 22:54:32 [loggers.py:257] Engine 000: Avg prompt "
        "throughput: 0.0 tokens/s, Avg generation throughput: 5.4 tokens/s, Running: 1 reqs, "
        "Waiting: 14 reqs, GPU KV cache usage: 76.5%, Prefix cache hit rate: 92.0%",
        (1, 14, 0.765, 0.92),
    ),
    (
        "vllm-project/vllm#12314 (V0)",
        "INFO 01-22 18:27:20 metrics.py:449] Avg prompt throughput: 0.0 tokens/s, Avg generation "
        "throughput: 41.7 tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 0 reqs, GPU KV "
        "cache usage: 2.0%, CPU KV cache usage: 0.0%.",
        (1, 0, 0.02, None),
    ),
]
OTHER = '(APIServer pid=851) INFO:     10.109.20.86:59146 - "GET /metrics HTTP/1.1" 200 OK'
START = (
    "(APIServer pid=1) INFO 03-17 15:30:00 [utils.py:302] vLLM server version 0.19.0, serving "
    "model m\n(APIServer pid=1) INFO 03-17 15:30:00 [utils.py:233] non-default args: {'model': "
    "'org/m', 'max_num_seqs': 64, 'gpu_memory_utilization': 0.9, 'extra': <object at 0x7f>}\n"
    "(EngineCore pid=2) INFO 03-17 15:30:40 [kv_cache_utils.py:1319] GPU KV cache size: 40,592 "
    "tokens\n"
)


def log(tmp_path: Path, text: str) -> Evidence:
    """Return the evidence from a log with this text."""
    path = tmp_path / "server.log"
    path.write_text(text)
    return read_source(path)


@pytest.mark.parametrize(("source", "line", "told"), QUOTED, ids=[source for source, *_ in QUOTED])
def test_lines_of_public_issues(
    tmp_path: Path, source: str, line: str, told: tuple[float | None, ...]
) -> None:
    found = log(tmp_path, f"{OTHER}\n{line}\n{OTHER}\n").series
    assert found is not None
    row = found.iloc[0]
    assert [row["running"], row["waiting"], row["usage"]] == pytest.approx(told[:3])
    assert told[3] is None or row["hit_rate"] == pytest.approx(told[3])


def test_settings_of_the_start(tmp_path: Path) -> None:
    settings = log(tmp_path, START).settings
    told = {name: known.value for name, known in settings.items()}
    assert told["version"] == "0.19.0"
    assert told["max_num_seqs"] == 64  # although the dictionary is invalid Python
    assert told["kv_tokens"] == 40592
    assert settings["max_num_seqs"].where == "server.log:2"


def test_colors_containers_and_new_year(tmp_path: Path) -> None:
    line = QUOTED[1][1]
    text = f"vllm-1  | \x1b[32m{line.replace('07-28 06:42:09', '12-31 23:59:55')}\x1b[0m\n"
    text += f"2026-01-01T00:00:05.5Z stdout F {line.replace('07-28 06:42:09', '01-01 00:00:05')}\n"
    found = log(tmp_path, text).series
    assert found is not None
    assert len(found) == 2
    plain = log(tmp_path, text.replace("2026-01-01T00:00:05.5Z stdout F ", "")).series
    assert plain is not None
    assert plain["t_s"].diff().iloc[1] == 10.0


def test_only_the_last_start_counts(tmp_path: Path) -> None:
    line = QUOTED[0][1]
    found = log(tmp_path, START + line + "\n" + START.replace("0.19.0", "0.20.0") + line + "\n")
    assert found.settings["version"].value == "0.20.0"
    assert found.series is not None
    assert len(found.series) == 1
    assert "2 times" in found.notes[0]


@pytest.mark.parametrize("minor", [19, 27])
def test_iterations(tmp_path: Path, minor: int) -> None:
    text = (
        "Iteration(7): 1 context requests, 512 context tokens, 3 generation requests, 3 "
        "generation tokens, iteration elapsed time: 31.25 ms"
    )
    if minor == 27:
        text = f"Engine 001: {text}, GPU KV cache usage: 12.5%"
    found = log(tmp_path, f"INFO 03-17 15:38:10 [core.py:360] {text}\n").steps
    assert found is not None
    row = found.iloc[0]
    assert (row["prefill_tokens"], row["decode_seqs"], row["seconds"]) == (512, 3, 0.03125)
    assert row["engine"] == (1 if minor == 27 else 0)


def test_truncated_log_is_read_and_other_file_rejected(tmp_path: Path) -> None:
    line = QUOTED[0][1]
    found = log(tmp_path, f"{line}\n{line[:150]}").series
    assert found is not None
    assert len(found) == 1
    for text in ("some words\nand others\n", "some, words\nand others\n"):
        with pytest.raises(InputError, match="unknown kind of file"):
            log(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,in,out\n1,2,3\n", r"the columns time, in, out\. Expected the columns arrival,"),
        ("time,in,out\n1,2,3\n", r"`simkv trace convert \S+ trace.csv --columns arrival=NAME,"),
        ("arrival,prompt_tokens\n1,2\n", "missing output_tokens; found a CSV file"),
        ("", "the file is empty"),
    ],
)
def test_table_is_not_called_a_log(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        log(tmp_path, text)


def test_arrivals_and_aborts(tmp_path: Path) -> None:
    text = (
        "INFO 03-17 15:38:10 [logger.py:44] Received request cmpl-1-0: prompt: 'a', params: "
        "SamplingParams(n=1, max_tokens=77, top_k=0), prompt_token_ids: [1, 2, 3], prompt_embeds "
        "shape: None, lora_request: None.\n"
        "INFO 03-17 15:38:30 [async_llm.py:500] Aborted request(s) cmpl-1-0.\n"
    )
    found = log(tmp_path, text).arrivals
    assert found is not None
    row = found.iloc[0]
    assert (row["max_tokens"], row["prompt_tokens"], row["gave_up_s"]) == (77, 3, 20.0)
