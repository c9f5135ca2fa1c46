"""Tests of the triage of hangs, short queues, ranks and rejections, on invented logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.incident.log_summary import LogSummary, summarize_log
from simkv.incident.measured_answer import read_inputs, summarize_measured, with_inferred

ACCESS = '(APIServer pid=7) INFO:     10.0.0.1:5000 - "POST /v1/completions HTTP/1.1" '


def vllm(second: int, running: int, waiting: int, usage: float = 20.0, engine: int = 0) -> str:
    at = f"{9 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
    return (
        f"(APIServer pid=7) INFO 03-04 {at} [loggers.py:127] Engine {engine:03}: Avg prompt "
        "throughput: 900.0 tokens/s, Avg generation throughput: 300.0 tokens/s, Running: "
        f"{running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: {usage}%, Prefix cache hit "
        "rate: 0.0%"
    )


def sglang(second: int, running: int, waiting: int, cached: int = 0) -> str:
    at = f"[2026-03-04 {9 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}]"
    return (
        f"{at} Prefill batch, #new-seq: 1, #new-token: {1000 - cached}, #cached-token: {cached}, "
        f"token usage: 0.20, #running-req: {running}, #queue-req: {waiting}, \n"
        f"{at} Decode batch, #running-req: {running}, #token: 9000, token usage: 0.20, cuda graph: "
        f"True, gen throughput (token/s): 800.00, #queue-req: {waiting}, "
    )


def health(second: int, status: str) -> str:
    return (
        f"[2026-03-04 {9 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}] INFO:     "
        f'10.0.0.3:33 - "GET /health HTTP/1.1" {status}'
    )


def triage(folder: Path, lines: Iterable[str]) -> LogSummary:
    path = folder / "server.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    found = summarize_log(read_inputs([path]))
    assert found is not None
    return found


def names(summary: LogSummary) -> list[str]:
    return [finding.name for finding in summary.findings]


@pytest.mark.parametrize(
    ("waiting", "rest", "hangs"),
    [
        (0, lambda at: health(at, "200 OK"), False),  # the requests may have finished
        (0, lambda at: health(at, "503 Service Unavailable"), True),
        (5, lambda at: health(at, "200 OK"), True),
        (0, lambda at: f"{health(at, '200 OK')}\n[2026-03-04 09:05:00] Watchdog timeout", True),
    ],
)
def test_sglang_hang(tmp_path: Path, waiting: int, rest: Callable[[int], str], hangs: bool) -> None:
    busy = [sglang(at, 8, waiting) for at in range(60)]
    found = triage(tmp_path, [*busy, *(rest(at) for at in range(60, 300, 10))])
    assert ("hang" in names(found)) == hangs
    if hangs:
        assert names(found)[0] == "hang"
        assert "client bound" not in names(found)
    assert "hang" not in names(triage(tmp_path, busy))  # the log ends


def test_idle_sglang_server_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    lines = [*(sglang(at, 8, 0) for at in range(60)), sglang(60, 0, 0).splitlines()[1]]
    failed = [health(at, "503 Service Unavailable") for at in range(70, 300, 10)]
    path.write_text("".join(f"{line}\n" for line in [*lines, *failed]))
    evidence = read_inputs([path])
    assert evidence.series is not None
    assert len(evidence.series) == 121
    assert not any("no batch line" in note for note in evidence.notes)


def test_sglang_hit_rate_is_recent(tmp_path: Path) -> None:
    lines = [sglang(at, 8, 0, 800 if at < 1500 else 40) for at in range(1800)]
    (fall,) = [one for one in triage(tmp_path, lines).findings if one.name == "hit rate falls"]
    assert "from 80 to 4 %" in fall.text


def test_queue_of_dense_lines_grows(tmp_path: Path) -> None:
    lines = [sglang(at, 8, at // 3) for at in range(300)]
    assert "queue grows" in names(triage(tmp_path, lines))
    level = [sglang(at, 8, 40 + at % 2) for at in range(300)]
    assert "queue grows" not in names(triage(tmp_path, level))


def test_short_queue_in_a_long_log_is_a_problem(tmp_path: Path) -> None:
    start = "(APIServer pid=7) INFO 03-04 08:59:50 [utils.py:233] non-default args: "
    calm = [vllm(10 * at, 12, 0) for at in range(360)]
    lines = [f"{start}{{'max_num_seqs': 32}}", *calm]
    assert not triage(tmp_path, lines).problems
    for place in range(100, 106):
        lines[place + 1] = vllm(10 * place, 32, 60)
    first = triage(tmp_path, lines).problems[0]
    assert first.name == "admission limit"
    assert "for 50.0 s, 1,000 s after the first line: " in first.text.replace("50 s", "50.0 s")


def test_unbalanced_ranks(tmp_path: Path) -> None:
    def lines(other: int, queue: int) -> list[str]:
        return [
            line
            for at in range(20)
            for line in (vllm(10 * at, 32, 5 * at), vllm(10 * at, other, queue, engine=1))
        ]

    found = triage(tmp_path, lines(9, 0))
    assert names(found)[0] == "unbalanced ranks"
    assert "queue grows" not in names(found)
    assert "unbalanced ranks" not in names(triage(tmp_path, lines(32, 40)))


def test_rejected_requests_are_a_problem(tmp_path: Path) -> None:
    def lines(status: str) -> list[str]:
        each = [f"{ACCESS}200 OK"] * 8 + [f"{ACCESS}{status}"] * 2
        return [line for at in range(10) for line in (*each, vllm(10 * at, 20, 0))]

    found = triage(tmp_path, lines("429 Too Many Requests"))
    assert names(found) == ["rejected requests"]
    assert "20 of 100 requests" in found.findings[0].text
    assert names(triage(tmp_path, lines("200 OK"))) == ["client bound"]


def test_logs_of_two_servers_are_refused(tmp_path: Path) -> None:
    def write(name: str, seconds: range, engine: int = 0) -> Path:
        text = "\n".join(vllm(at, 8, 0, engine=engine) for at in seconds)
        (tmp_path / name).write_text(text + "\n")
        return tmp_path / name

    one = write("one.log", range(0, 300, 10))
    with pytest.raises(InputError, match=r"one.log and two.log: both have .* Diagnose each"):
        read_inputs([one, write("two.log", range(5, 305, 10))])
    read_inputs([one, write("rank.log", range(5, 305, 10), engine=1)])
    read_inputs([one, write("later.log", range(300, 600, 10))])


def test_death_has_its_exception(tmp_path: Path) -> None:
    died = (
        "(EngineCore_DP0 pid=70) ERROR 03-04 09:05:02 [core.py:710] EngineCore encountered a fatal "
        "error.\n(EngineCore_DP0 pid=70) ERROR 03-04 09:05:02 [core.py:710] torch.OutOfMemory"
        "Error: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    found = triage(tmp_path, [*(vllm(10 * at, 20, 0) for at in range(10)), died])
    first = found.findings[0]
    assert first.name == "engine died"
    assert "torch.OutOfMemoryError: CUDA out of memory." in first.text
    assert "lower gpu_memory_utilization" in first.advice


def test_inferred_setting_stays_inferred_in_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("\n".join(vllm(10 * at, 32, 40 + at) for at in range(6)) + "\n")
    evidence = read_inputs([path])
    evidence = with_inferred(evidence, summarize_log(evidence))
    assert evidence.settings["max_num_seqs"].value == 32
    again = summarize_log(evidence)
    assert again is not None
    answer = summarize_measured(again, evidence, "only the log lines were evaluated")
    result, _, cause, fix, _ = answer.summary_lines
    assert "(max_num_seqs=32, inferred)" in cause
    assert "all slots were busy" not in result
    assert fix.startswith("Fix: raise max_num_seqs; ")


def test_earlier_exceptions_are_no_cause_of_a_death(tmp_path: Path) -> None:
    died = "ERROR 03-04 09:59:02 [core.py:710] EngineCore encountered a fatal error."
    earlier = "ERROR 03-04 09:00:02 [serving.py:7] ValueError: prompt is too long"
    lines = [earlier, *(vllm(10 * at, 20, 0) for at in range(300)), died]
    first = triage(tmp_path, lines).findings[0]
    assert first.name == "engine died"
    assert "ValueError" not in first.text
