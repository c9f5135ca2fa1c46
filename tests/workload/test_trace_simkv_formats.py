"""Tests that simkv's own traces round-trip without loss, as CSV and as Parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.core.request import Request, Segment
from simkv.workload.trace_conversion import convert_trace
from simkv.workload.trace_reader import Selection, TraceReader, read_trace
from simkv.workload.workload_section import Workload, build_clients
from traces.generate_traces import write_requests

NAMES = st.one_of(
    st.sampled_from(["h0", "h12", "u0", "o0", "system", "g a,b:c%", "ü-1", "h007", "o"]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """Draw requests in order of arrival, with all fields that a trace can store."""
    count = draw(st.integers(1, 6))
    times = sorted(draw(st.lists(st.floats(0, 1e6), min_size=count, max_size=count)))
    drawn = []
    for number, time in enumerate(times):
        pieces = draw(st.lists(st.tuples(NAMES, st.integers(0, 9), st.integers(1, 99)), max_size=3))
        segments = [Segment(name, start, start + size) for name, start, size in pieces]
        rest = draw(st.integers(0 if segments else 1, 50))
        if segments and rest:
            segments.append(Segment(f"u{number}", 0, rest))
        if len(segments) == 1 and segments[0][:2] == (f"u{number}", 0):
            segments = []  # a prompt that shares no tokens is written without segments
        output = draw(st.integers(1, 100))
        drawn.append(
            Request(
                id=number,
                prompt_tokens=rest + sum(size for *_, size in pieces),
                max_tokens=draw(st.integers(output, 200)),
                arrival=time,
                priority=draw(st.integers(-5, 5)),
                has_images=draw(st.booleans()),
                ignore_eos=draw(st.booleans()),
                segments=tuple(segments),
                output_tokens=output,
                timeout=draw(st.none() | st.floats(0.1, 1e5)),
            )
        )
    return drawn


@pytest.mark.parametrize("end", [".csv", ".csv.gz", ".parquet"])
@given(sent=requests())
def test_requests_round_trip(
    tmp_path_factory: pytest.TempPathFactory, end: str, sent: list[Request]
) -> None:
    if end == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs the extra simkv[parquet]")
    path = tmp_path_factory.mktemp("own") / f"t{end}"
    write_requests(path, sent, {})
    assert read_trace(path).requests() == sent


CHAT = Workload.model_validate(
    {
        "sessions": {
            "num_sessions": 8,
            "request_rate": 1.0,
            "turns": {"distribution": "uniform", "low": 1, "high": 4},
            "prompt_tokens": {"distribution": "uniform", "low": 5, "high": 50},
            "output_tokens": {"distribution": "uniform", "low": 5, "high": 50},
            "think_time": {"distribution": "exponential", "mean": 2.0},
            "prefix_group": "system",
            "prefix_tokens": 32,
        }
    }
)


@pytest.mark.parametrize("end", [".csv", ".parquet"])
def test_sessions_round_trip(tmp_path: Path, end: str) -> None:
    if end == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs the extra simkv[parquet]")
    sent = build_clients(CHAT, None)
    write_requests(tmp_path / f"t{end}", sent.requests, sent.after)
    back = build_clients(Workload.model_validate({"trace": str(tmp_path / f"t{end}")}), None)
    assert (back.requests, back.after) == (sent.requests, sent.after)


def test_converted_trace_equals_the_original(tmp_path: Path) -> None:
    """This includes a part of the trace whose prompts refer to omitted rows."""
    sent = build_clients(CHAT, None)
    write_requests(tmp_path / "t.csv", sent.requests, sent.after)
    for selection in (Selection(), Selection(sample=0.6), Selection(start=1.0, limit=9)):
        part = read_trace(tmp_path / "t.csv", selection)
        convert_trace(TraceReader(tmp_path / "t.csv", selection), tmp_path / "part.csv")
        again = read_trace(tmp_path / "part.csv")
        assert again.requests() == part.requests()
        assert again.after() == part.after()


def test_tokens_of_omitted_rows_keep_their_identity(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "arrival,prompt_tokens,output_tokens,prefix\n"
        "0,10,5,\n1,20,5,u0:10 o0:5\n2,20,5,u0:10 o0:5\n"
    )
    a, b = read_trace(path, Selection(start=0.5)).requests()
    assert a.segments[:2] == b.segments[:2]
    assert [s.end - s.start for s in a.segments] == [10, 5, 5]
    assert not {"u0", "o0"} & {segment.stream for segment in a.segments[:2]}


def test_pieces_are_renumbered_with_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "arrival,prompt_tokens,output_tokens,prefix\n0,3,1,\n1,10,5,\n2,20,5,u1:10 o1:5\n"
    )
    _, later = read_trace(path, Selection(start=0.5)).requests()
    assert later.segments == (Segment("u0", 0, 10), Segment("o0", 0, 5), Segment("u1", 0, 5))


def test_all_columns_except_lengths_are_optional(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("output_tokens,prompt_tokens\n3,20\n")
    trace = read_trace(path)
    assert (trace.format, trace.timed) == ("simkv", False)
    convert_trace(TraceReader(path), tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == "prompt_tokens,output_tokens\n20,3\n"


def test_writes_only_columns_with_values(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,priority,max_tokens\n0.5,20,3,0,\n")
    convert_trace(TraceReader(path), tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == (
        "arrival,prompt_tokens,output_tokens\n0.5,20,3\n"
    )


def test_column_needed_late_is_written_for_all_rows(tmp_path: Path) -> None:
    rows = [f"{i},10,1,{0 if i < 9000 else 7}" for i in range(9001)]
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,priority\n" + "\n".join(rows))
    assert convert_trace(TraceReader(path), tmp_path / "again.csv") == 9001
    assert read_trace(tmp_path / "again.csv").requests()[-1].priority == 7
    assert read_trace(tmp_path / "again.csv").requests() == read_trace(path).requests()


def test_unordered_rows_are_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt_tokens,output_tokens\n5,1,1\n3,2,1\n")
    convert_trace(TraceReader(path), tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text().splitlines()[1:] == ["3.0,2,1", "5.0,1,1"]


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        ("", "", "2: prompt_tokens: should be a whole number of at least 1; found '0'"),
        ("timeout", "0", "2: timeout: should be a number greater than 0; found '0'"),
        ("priority", "1.5", "2: priority: should be a whole number; found '1.5'"),
        ("ignore_eos", "yes", "2: ignore_eos: should be 0 or 1; found 'yes'"),
        ("prefix", "h1", "2: prefix: should be pieces such as h12:512 or o3:0-100; found 'h1'"),
        ("prefix", "a:9-9", "2: prefix: the end of each piece must be after its start"),
        ("prefix", "a:9 b:9", "2: prefix: should be at most .*found 18 of 10"),
        ("max_tokens", "0", "2: max_tokens: should be a whole number of at least 1; found '0'"),
        ("think_time", "-1", "2: think_time: should be a number of at least 0"),
    ],
)
def test_bad_values_are_reported_by_line_and_column(
    tmp_path: Path, columns: str, row: str, message: str
) -> None:
    path = tmp_path / "t.csv"
    lengths = "10" if columns else "0"
    path.write_text(f"arrival,prompt_tokens,output_tokens,{columns}\n1,{lengths},1,{row}\n")
    with pytest.raises(InputError, match=f"t.csv:{message}"):
        read_trace(path)


def test_reports_unknown_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,arrival,prompt_tokens,output_tokens,prioirty\n0,1,1,1,5\n")
    notes = read_trace(path).tally.notes
    assert notes == ["ignored unknown columns: 'prioirty' (did you mean 'priority'?)"]


def test_parquet_values_are_validated_as_csv(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra simkv[parquet]")
    pytest.importorskip("pyarrow.parquet")
    columns = {"arrival": [0.5, 1.0, 2.0], "prompt_tokens": [3, 0, 5], "output_tokens": [1, 2, 3]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"t\.parquet:2: prompt_tokens: .*at least 1; found '0'"):
        read_trace(tmp_path / "t.parquet")
    left = read_trace(tmp_path / "t.parquet", Selection(skip_bad=True))
    assert left.rows.prompt_tokens.tolist() == [3, 5]
    cut = tmp_path / "cut.parquet"
    cut.write_bytes((tmp_path / "t.parquet").read_bytes()[:100])
    with pytest.raises(InputError, match=r"cut\.parquet: should be a Parquet file"):
        read_trace(cut)


def test_missing_pyarrow_is_reported_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(InputError, match=r"pip install 'simkv\[parquet\]'"):
        read_trace(tmp_path / "t.parquet")


def test_committed_traces_match_their_script(root: Path, tmp_path: Path) -> None:
    import runpy

    script = runpy.run_path(str(root / "traces" / "generate_traces.py"))
    for name, form in script["WORKLOADS"].items():
        drawn = build_clients(Workload.model_validate(form), None)
        write_requests(tmp_path / name, drawn.requests, drawn.after)
        assert (tmp_path / name).read_bytes() == (root / "traces" / name).read_bytes()


def test_numbers_keep_all_digits(tmp_path: Path) -> None:
    times = np.cumsum(np.random.default_rng(0).exponential(0.1, 500))
    sent = [Request(i, 5, 1, arrival=float(time)) for i, time in enumerate(times)]
    write_requests(tmp_path / "t.csv", sent, {})
    assert read_trace(tmp_path / "t.csv").rows.arrival.tolist() == times.tolist()
