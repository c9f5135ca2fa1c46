"""Tests of every trace format on invented rows: detection from the file, and values."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.core.request import Request, Segment
from simkv.workload.clients import Dependency
from simkv.workload.formats.azure import parse_timestamp, parse_timestamps
from simkv.workload.formats.format_detection import FORMAT_NAMES, detect_format
from simkv.workload.trace_reader import Selection, Trace, read_trace


def write(path: Path, text: str) -> Path:
    path.write_text(text, newline="")
    return path


def shape(trace: Trace) -> list[tuple[float, int, int]]:
    """Return arrival (s), prompt tokens and output tokens of every request."""
    return [(r.arrival, r.prompt_tokens, r.output_tokens) for r in trace.requests()]


AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:59.7000000,374,44\r\n"
    "2023-11-16 23:59:59.9123456,396,109\r\n"
    "2023-11-17 00:00:01.7000000,879,55"
)


def test_azure_2023_has_ticks_of_100_ns_and_crlf_line_ends(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a", AZURE_2023))
    assert trace.format == "azure"
    assert shape(trace) == [(0.0, 374, 44), (0.2123456, 396, 109), (2.0, 879, 55)]


@pytest.mark.parametrize(
    ("times", "arrivals"),
    [
        (["00:00:00.009930+00:00", "00:00:01+00:00", "00:00:01.5+00:00"], [0.0, 0.99007, 1.49007]),
        (["00:00:00", "00:00:02", "00:00:02.25"], [0.0, 2.0, 2.25]),
        (["00:00:00Z", "01:00:01+01:00", "00:00:02.000000001+0000"], [0.0, 1.0, 2.000000001]),
        (["01:30:00-00:30", "01:00:00-01:00", "02:00:03+00"], [0.0, 0.0, 3.0]),
    ],
)
def test_azure_2024_with_and_without_a_fraction_and_an_offset(
    tmp_path: Path, times: list[str], arrivals: list[float]
) -> None:
    rows = "".join(f"2024-05-10 {time},10,1\n" for time in times)
    path = write(tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert read_trace(path).rows.arrival.tolist() == arrivals


@pytest.mark.parametrize("zone", ["", "Z", "+01:00", "-0730", "+02"])
def test_parsing_a_column_of_times_equals_parsing_each(zone: str) -> None:
    times = [f"2024-05-10 23:59:{i:02}.{i}{zone}" for i in range(60)]
    assert parse_timestamps(times).tolist() == [parse_timestamp(time) for time in times]
    assert parse_timestamp(f"1970-01-02T00:00:00.5{zone}") == int(
        (86_400.5 - {"+01:00": 3600, "-0730": -27_000, "+02": 7200}.get(zone, 0)) * 1e9
    )


def test_azure_2025_has_images(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2024-10-15 00:00:00.1,0,10,1\n2024-10-15 00:00:00.2,2,10,1\n",
    )
    assert [r.has_images for r in read_trace(path).requests()] == [False, True]


def test_mooncake_blocks_keep_their_identity(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3005, "input_length": 1024, "output_length": 7, "hash_ids": [0, 9]},
    ]
    path = write(tmp_path / "m", "\n".join(map(json.dumps, lines)))
    first, second = read_trace(path).requests()
    assert first.segments == (
        Segment("h0", 0, 512),
        Segment("h1", 0, 512),
        Segment("h2", 0, 1100 - 1024),
    )
    assert second.segments == (Segment("h0", 0, 512), Segment("h9", 0, 512))
    assert (second.arrival, second.max_tokens) == (3.005, 7)


def test_qwen_traces_have_smaller_blocks_and_seconds(tmp_path: Path) -> None:
    line = {
        "chat_id": 1,
        "timestamp": 61.5,
        "input_length": 20,
        "output_length": 3,
        "hash_ids": [7, 8],
    }
    request = read_trace(write(tmp_path / "q.jsonl", json.dumps(line))).requests()[0]
    assert request.arrival == 61.5
    assert request.segments == (Segment("h7", 0, 16), Segment("h8", 0, 4))


def test_mooncake_row_with_too_few_hash_ids_is_reported(tmp_path: Path) -> None:
    rows = [
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}',
        '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
    ]
    with pytest.raises(InputError, match=r"m:2: hash_ids: .*512 tokens.*found 1 ids for 600"):
        read_trace(write(tmp_path / "m", "\n".join(rows)))


def test_burstgpt_columns_are_found_by_name_and_failures_left_out(tmp_path: Path) -> None:
    v1 = read_trace(
        write(
            tmp_path / "v1.csv",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,472,18,490,Conversation log\n"
            "45,ChatGPT,1087,0,1087,Conversation log\n"
            "46,GPT-4,0,0,0,API log\n"
            "47,GPT-4,0,9,9,API log\n"
            "118,GPT-4,417,276,693,Conversation log\n",
        )
    )
    assert (v1.format, shape(v1)) == ("burstgpt", [(5.0, 472, 18), (118.0, 417, 276)])
    assert v1.tally.rows == 5
    assert v1.tally.failed == {"with no output token": 2, "with no prompt token": 1}
    assert v1.tally.first == {"with no output token": 3, "with no prompt token": 5}
    assert v1.tally.lines()[0].startswith("3 of 5 failed requests excluded: 2 with no output token")
    v3 = read_trace(
        write(
            tmp_path / "v3.csv",
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,"
            "Total tokens,Log Type\n"
            "5.5,abc,3.2,ChatGPT,10,2,12,x\n6,,1,ChatGPT,11,2,13,x\n7,abc,1,ChatGPT,12,2,14,x\n",
        )
    )
    assert shape(v3) == [(5.5, 10, 2), (6.0, 11, 2), (7.0, 12, 2)]
    assert v3.rows.session is not None
    assert (v3.rows.session.tolist(), v3.sessions) == ([0, -1, 0], ["abc"])


def test_reads_vidur_traces_and_lengths(tmp_path: Path) -> None:
    timed = write(
        tmp_path / "t.csv",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.25,100,5\n1.5,50.0,6\n",
    )
    assert shape(read_trace(timed)) == [(0.25, 100, 5), (1.5, 50, 6)]
    lengths = write(
        tmp_path / "l.csv",
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n30,3,33,10\n",
    )
    trace = read_trace(lengths)
    assert (trace.format, trace.timed, trace.rows.prompt_tokens.tolist()) == ("vidur", False, [30])
    old = write(tmp_path / "o.csv", "Time,PromptTokenCount,CompletionTokenCount\n2,7,8\n")
    assert (read_trace(old).format, shape(read_trace(old))) == ("vidur-replay", [(2.0, 7, 8)])


def test_reads_splitwise_sim(tmp_path: Path) -> None:
    header = (
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size"
    )
    path = write(tmp_path / "s.csv", f"{header}\n0,2,0,0.5,1,4096,32\n1,2,0,3,1,2048,8\n")
    assert shape(read_trace(path)) == [(0.5, 4096, 32), (3.0, 2048, 8)]
    path = write(tmp_path / "b.csv", f"{header}\n0,2,0,0.5,4,4096,32\n")
    with pytest.raises(InputError, match=r"b\.csv:2: batch_size: should be 1, .*found '4'"):
        read_trace(path)


def bench_result(**more: object) -> dict[str, object]:
    return {
        "backend": "vllm",
        "num_prompts": 3,
        "completed": 2,
        "input_lens": [10, 20, 30],
        "output_lens": [1, 0, 3],
        "ttfts": [0.1, 0.0, 0.2],
        "itls": [[], [], [0.1, 0.1]],
        "start_times": [107.5, 106.25, 106.0],
        "errors": ["", "boom", ""],
        **more,
    }


def test_reads_results_of_vllm_bench_serve(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", json.dumps(bench_result(max_concurrency=4)))
    trace = read_trace(path)
    assert (trace.format, shape(trace)) == ("vllm-bench", [(0.0, 30, 3), (1.5, 10, 1)])
    assert trace.tally.failed == {"with an error": 1}
    assert any("max_concurrency 4" in note for note in trace.tally.notes)
    twice = (
        json.dumps(bench_result()) + "\n" + json.dumps(bench_result(input_lens=[1, 2, 3])) + "\n"
    )
    again = read_trace(write(tmp_path / "appended.json", twice))
    assert [row[1] for row in shape(again)] == [3, 1]
    assert any("last of 2" in note for note in again.tally.notes)


def test_results_without_details_name_the_missing_lists(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", '{"backend": "vllm", "num_prompts": 3, "completed": 3}')
    with pytest.raises(InputError, match=r"input_lens.*--save-detailed"):
        read_trace(path)


def test_llmservingsim_prompts_are_identified_by_their_tokens(tmp_path: Path) -> None:
    same, one, two = list(range(16)), [100] * 4, [200] * 20
    lines = [
        {"input_toks": 20, "output_toks": 5, "arrival_time_ns": 0, "input_tok_ids": same + one},
        {"input_toks": 36, "output_toks": 6, "arrival_time_ns": 5e8, "input_tok_ids": same + two},
        {"input_toks": 9, "output_toks": 6, "arrival_time_ns": 7e8},
    ]
    trace = read_trace(write(tmp_path / "l.jsonl", "\n".join(map(json.dumps, lines))))
    a, b, c = trace.requests()
    assert trace.format == "llmservingsim"
    assert a.segments[0] == b.segments[0] == Segment(a.segments[0].stream, 0, 16)
    assert a.segments[1].stream != b.segments[1].stream
    assert [s.end - s.start for s in b.segments] == [16, 16, 4]
    assert (b.arrival, c.segments) == (0.5, ())


def test_llmservingsim_calls_follow_the_end_of_the_previous_call(tmp_path: Path) -> None:
    calls = [
        {"input_toks": 14, "output_toks": 3, "tool_duration_ns": 2_000_000_000},
        {"input_toks": 15, "output_toks": 4, "tool_duration_ns": 0},
    ]
    lines = [
        {"session_id": "task-0", "arrival_time_ns": 1_000_000_000, "sub_requests": calls},
        {"session_id": "task-1", "arrival_time_ns": 2_000_000_000, "sub_requests": calls[:1]},
    ]
    trace = read_trace(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines))))
    assert shape(trace) == [(1.0, 14, 3), (2.0, 14, 3), (3.0, 15, 4)]
    assert trace.after() == {2: Dependency((0,), 2.0)}
    assert trace.sessions == ["task-0", "task-1"]


def test_reads_llmservingsim_captures_of_vllm(tmp_path: Path) -> None:
    base = 1_787_267_980.0
    lines = [
        {
            "request_id": f"b-{i}",
            "input_toks": 7 + i,
            "output_toks": 2,
            "arrival_time": base + i / 4,
        }
        for i in range(3)
    ]
    (tmp_path / "run").mkdir()
    with gzip.open(tmp_path / "run" / "requests.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, lines)))
    trace = read_trace(tmp_path / "run")
    assert (trace.format, shape(trace)) == (
        "llmservingsim-bench",
        [(0.0, 7, 2), (0.25, 8, 2), (0.5, 9, 2)],
    )


def test_reads_requests_of_a_recorded_case(tmp_path: Path) -> None:
    write(tmp_path / "requests.csv", "id,arrival_s,prompt_tokens,output_tokens\n0,0.5,40,2\n")
    write(tmp_path / "prefix_blocks.jsonl", '{"id": 0, "hash_ids": [5, 6]}\n')
    trace = read_trace(tmp_path)
    assert trace.format == "case"
    assert trace.requests()[0].segments == (
        Segment("h5", 0, 16),
        Segment("h6", 0, 16),
        Segment("u0", 0, 8),
    )
    (tmp_path / "blis").mkdir()
    write(
        tmp_path / "blis" / "requests.csv",
        "id,stage,arrival_s,prompt_tokens,output_tokens,shared_prefix_tokens\n"
        "0,sync,0,40,2,32\n1,sync,1,40,2,32\n2,constant-1,2,40,2,32\n",
    )
    begins = [r.segments[0] for r in read_trace(tmp_path / "blis").requests()]
    sync, other = Segment("gcommon sync", 0, 32), Segment("gcommon constant-1", 0, 32)
    assert begins == [sync, sync, other]  # each stage has its own prefix


BLIS_COLUMNS = (
    "request_id,client_id,tenant_id,slo_class,session_id,round_index,prefix_group,prefix_length,"
    "streaming,input_tokens,output_tokens,text_tokens,image_tokens,audio_tokens,video_tokens,"
    "reason_ratio,model,deadline_us,server_input_tokens,arrival_time_us,send_time_us,"
    "first_chunk_time_us,last_chunk_time_us,num_chunks,status,error_message,finish_reason\n"
)


def blis_row(
    number: int,
    arrival: int,
    tokens: int,
    output: int,
    *,
    group: str = "",
    prefix: int = 0,
    session: str = "",
    turn: int = 0,
    server: int = 0,
    send: int = 0,
    deadline: int = 0,
    status: str = "ok",
    error: str = "",
) -> str:
    return (
        f"{number},c,t,standard,{session},{turn},{group},{prefix},true,{tokens},{output},{tokens},"
        f"0,0,0,0.0,,{deadline},{server},{arrival},{send},0,0,1,{status},{error},stop\n"
    )


BLIS_HEADER = "trace_version: 2\ntime_unit: microseconds\nmode: real\nwarm_up_requests: 0\n"


def test_blis_in_two_files_is_read_by_either_name(tmp_path: Path) -> None:
    rows = [
        blis_row(0, 0, 100, 5, group="a", prefix=64, server=170),
        blis_row(1, 1_500_000, 10, 5, group="a", prefix=64, send=1_700_000, deadline=9_500_000),
        blis_row(2, 2_000_000, 10, 5, server=17),
        blis_row(3, 3_000_000, 10, 2, status="error", error='"two\nlines, one error"'),
        blis_row(4, 4_000_000, 10, 2),
    ]
    write(tmp_path / "trace.yaml", BLIS_HEADER)
    write(tmp_path / "trace.csv", BLIS_COLUMNS + "".join(rows))
    for name in ("trace.yaml", "trace.csv", "."):
        trace = read_trace(tmp_path / name)
        assert trace.format == "blis"
        assert shape(trace) == [(0.0, 164, 5), (1.7, 74, 5), (2.0, 17, 5), (4.0, 10, 2)]
        assert trace.tally.failed == {"with a status other than ok": 1}
        a, b, c, _ = trace.requests(timeout=60.0)
        assert a.segments == (Segment("ga", 0, 64), Segment("u0", 0, 100))
        assert b.segments[0] == a.segments[0]
        assert (b.timeout, c.timeout, c.segments) == (8.0, 60.0, ())


def test_blis_in_one_file_with_accumulating_sessions(tmp_path: Path) -> None:
    header = BLIS_HEADER + "session_context_growth: accumulate\n"
    rows = [
        blis_row(0, 0, 100, 50, session="s1"),
        blis_row(1, 500_000, 60, 15, session="s2"),
        blis_row(2, 1_000_000, 30, 40, session="s1", turn=1),
        blis_row(3, 2_000_000, 25, 20, session="s1", turn=2),
    ]
    path = write(tmp_path / "one.csv", header + BLIS_COLUMNS + "".join(rows))
    trace = read_trace(path)
    assert [row[1] for row in shape(trace)] == [100, 60, 180, 245]
    last = trace.requests()[3]
    assert last.segments == (
        Segment("u0", 0, 100),
        Segment("o0", 0, 50),
        Segment("u2", 0, 30),
        Segment("o2", 0, 40),
        Segment("u3", 0, 25),
    )


def test_blis_without_a_header_is_noted_with_correct_line_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", BLIS_COLUMNS + blis_row(0, 0, 10, 5))
    assert any("no YAML header" in note for note in read_trace(path).tally.notes)
    path = write(tmp_path / "y.csv", BLIS_HEADER + BLIS_COLUMNS + blis_row(0, 0, -1, 5))
    with pytest.raises(InputError, match=r"y\.csv:6: input_tokens: should be a whole number"):
        read_trace(path)


def servegen(folder: Path) -> Path:
    """Write a trace with two clients; one of them sends nothing in the second time window."""
    folder.mkdir()
    write(folder / "chunk-3-trace.csv", "0,0.5,1.0,Gamma,1.0,2.0\n600,0,0,,0,0\n")
    write(folder / "chunk-7-trace.csv", "0,0.1,3.0,Weibull,0.5,5.0\n600,0.2,1.0,Gamma,2.0,2.5\n")
    lengths = {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0, 9: 0.0}"}}
    write(folder / "chunk-3-dataset.json", json.dumps(lengths))
    lengths["600"] = {"input_tokens": "{}", "output_tokens": "{5: 2.0}"}
    write(folder / "chunk-7-dataset.json", json.dumps(lengths))
    return folder


def test_servegen_samples_each_window_at_its_rate(tmp_path: Path) -> None:
    trace = read_trace(servegen(tmp_path / "m"))
    assert any("including clients without requests" in n for n in trace.tally.notes)
    arrival, session = trace.rows.arrival, trace.rows.session
    assert trace.sessions == ["client 3", "client 7"]
    assert session is not None
    late = arrival >= 600
    assert [int((session[~late] == c).sum()) for c in (0, 1)] == [300, 60]
    assert [int((session[late] == c).sum()) for c in (0, 1)] == [0, 120]
    assert set(trace.rows.prompt_tokens.tolist()) == {10, 20}
    assert set(trace.rows.output_tokens[~late].tolist()) == {3}
    assert set(trace.rows.output_tokens[late].tolist()) == {5}
    assert arrival.max() < 1200


def test_servegen_samples_do_not_depend_on_start_or_tar(tmp_path: Path) -> None:
    folder = servegen(tmp_path / "m")
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as tar:
        tar.add(folder, "data/language/m")
    whole = read_trace(tmp_path / "m.tar.gz")
    assert whole.format == "servegen"
    assert whole.rows.arrival.tolist() == read_trace(folder).rows.arrival.tolist()
    part = read_trace(folder, Selection(start=600, duration=300))
    wanted = [t - 600 for t in whole.rows.arrival.tolist() if 600 <= t < 900]
    assert part.rows.arrival.tolist() == wanted
    other = read_trace(folder, Selection(seed=1))
    assert other.rows.arrival.tolist() != whole.rows.arrival.tolist()
    assert len(other) == len(whole)


def test_servegen_does_not_execute_code_in_its_files(tmp_path: Path) -> None:
    folder = servegen(tmp_path / "m")
    bomb = "__import__('pathlib').Path('owned').touch() or {1: 1.0}"
    lengths = {"0": {"input_tokens": bomb, "output_tokens": "{3: 1.0}"}}
    write(folder / "chunk-3-dataset.json", json.dumps(lengths))
    with pytest.raises(InputError, match=r"chunk-3-dataset.json: window 0: input_tokens: should"):
        read_trace(folder)
    assert not Path("owned").exists()


def test_servegen_reports_file_and_line_of_a_bad_window(tmp_path: Path) -> None:
    folder = servegen(tmp_path / "m")
    write(folder / "chunk-7-trace.csv", "0,0.1,3.0,Pareto,0.5,5.0\n")
    with pytest.raises(
        InputError, match=r"chunk-7-trace\.csv:1: distribution: should be Gamma or Weibull"
    ):
        read_trace(folder)
    with pytest.raises(InputError, match=r"pass (its|the) folder"):
        read_trace(folder / "chunk-3-trace.csv")


def test_damaged_tar_is_one_clear_message(tmp_path: Path) -> None:
    folder = servegen(tmp_path / "m")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(folder, "m")
    (tmp_path / "cut.tar.gz").write_bytes(packed.getvalue()[:-200])
    with pytest.raises(InputError, match=r"incomplete|damaged"):
        read_trace(tmp_path / "cut.tar.gz")


def test_unknown_formats_are_rejected_with_the_supported_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "Time,tokens\n1,2\n")
    with pytest.raises(
        InputError, match=r"found a CSV file with the columns Time, tokens. Exp.*arrival=NAME"
    ):
        read_trace(path)
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(InputError, match=r"unknown format 'azur' \(did you mean 'azure'\?\)"):
        detect_format(path, "azur")
    (tmp_path / "x.bin").write_bytes(b"\0\1\2" * 100)
    with pytest.raises(InputError, match="unknown trace format"):
        read_trace(tmp_path / "x.bin")
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="empty: the file is empty"):
        read_trace(tmp_path / "empty")


def test_rejects_a_format_that_does_not_match(tmp_path: Path) -> None:
    path = write(tmp_path / "v.csv", "num_prefill_tokens,num_decode_tokens\n1,2\n")
    with pytest.raises(InputError, match=r"v\.csv:1: header: missing TIMESTAMP"):
        read_trace(path, format="azure")


def test_every_format_reads_gzip(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.csv.gz", "wb") as file:
        file.write(AZURE_2023.encode())
    assert len(read_trace(tmp_path / "a.csv.gz")) == 3
    assert len(FORMAT_NAMES) == len(set(FORMAT_NAMES))


def test_requests_are_plain_python_numbers(tmp_path: Path) -> None:
    request: Request = read_trace(write(tmp_path / "a", AZURE_2023)).requests(timeout=3)[1]
    assert {type(request.id), type(request.prompt_tokens), type(request.max_tokens)} == {int}
    assert type(request.arrival) is float
    assert request.timeout == 3
