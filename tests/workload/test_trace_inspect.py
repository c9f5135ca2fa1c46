"""Tests of the statistics of a trace, compared with a plain computation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.block_keys import TokenContent
from simkv.core.errors import InputError
from simkv.core.request import Request
from simkv.workload.request_columns import (
    NameTable,
    PromptPieces,
    RequestRows,
    parse_pieces,
)
from simkv.workload.trace_reader import TraceReader, read_trace
from simkv.workload.trace_statistics import (
    BINS,
    BinnedAmounts,
    LengthHistogram,
    PeakDemand,
    ServiceTime,
    TraceStatistics,
    inspect_trace,
)
from simkv.workload.workload_section import Workload, build_clients
from tests.core.shared_prefixes import common_prefix
from traces.generate_traces import write_requests

LENGTHS = st.lists(st.integers(1, 10**6), min_size=1, max_size=60)


@given(LENGTHS)
def test_percentiles_equal_numpy(values: list[int]) -> None:
    lengths = LengthHistogram()
    for cut in (values[:7], values[7:]):
        lengths.add(np.array(cut, np.int64))
    found = lengths.figures()
    assert found["mean"] == pytest.approx(np.mean(values))
    for quantile in (50, 90, 99):
        assert found[f"p{quantile}"] == pytest.approx(np.percentile(values, quantile))
    assert found["max"] == max(values)


def rows_of(times: list[float], prompts: list[int], outputs: list[int]) -> RequestRows:
    return RequestRows(np.array(times), np.array(prompts), np.array(outputs))


@given(st.data(), st.integers(1, 30))
def test_peak_demand_does_not_depend_on_batches(data: st.DataObject, n: int) -> None:
    draw = data.draw
    times = sorted(draw(st.lists(st.integers(0, 40), min_size=n, max_size=n)))
    prompts = draw(st.lists(st.sampled_from([16, 32, 7, 64]), min_size=n, max_size=n))
    outputs = draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    service = ServiceTime(prefill_rate=16.0, tpot=1.0)
    demand = PeakDemand(service, 16)
    size = draw(st.integers(1, n))
    for low in range(0, n, size):
        cut = slice(low, low + size)
        demand.add(rows_of([float(t) for t in times[cut]], prompts[cut], outputs[cut]))
    ends = [t + p / 16 + o for t, p, o in zip(times, prompts, outputs, strict=True)]
    blocks = [-(-(p + o - 1) // 16) for p, o in zip(prompts, outputs, strict=True)]
    held = [[i for i in range(n) if times[i] <= now and (ends[i] > now)] for now in times]
    assert demand.requests == max(len(some) for some in held)
    assert demand.blocks == max(sum(blocks[i] for i in some) for some in held)


def test_time_bins_widen_for_long_traces() -> None:
    course = BinnedAmounts()
    course.add(np.array([0.5, 0.6, 1.5]))
    assert (course.most(1.0), course.width) == (2, 1.0)
    course.add(np.array([3.0 * BINS]))
    assert (course.width, course.values.sum()) == (4.0, 4)
    assert course.most(64.0) == 3


PIECES = st.lists(
    st.sampled_from(["a:8", "a:8-16", "a:16", "b:8", "b:3", "h1:8", "h2:8", "u0:5", "o0:4"]),
    max_size=4,
)


@given(st.lists(st.tuples(PIECES, st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=8))
def test_shared_prefixes_match_the_token_contents(
    drawn: list[tuple[list[str], int, int]],
) -> None:
    """Prompts are compared with all earlier prompts and their outputs, token by token as in the
    cache.
    """
    names = NameTable()
    pieces = [parse_pieces(" ".join(words), names) for words, _, _ in drawn]
    prompts = [
        sum(end - start for *_, start, end in row) + max(rest, 0 if row else 1)
        for row, (_, rest, _) in zip(pieces, drawn, strict=True)
    ]
    rows = rows_of([float(i) for i in range(len(drawn))], prompts, [out for *_, out in drawn])
    rows.number = np.arange(len(drawn))
    rows.pieces = PromptPieces.of(pieces)
    survey = TraceStatistics(block_size=4)
    shared = survey.sharing.add(rows).tolist()
    from simkv.workload.trace_reader import Trace
    from simkv.workload.trace_source import Tally

    sent = Trace(Path(), "simkv", rows, Tally(), [], names.names).requests()
    for index, request in enumerate(sent):
        longest = max(
            (
                common_prefix(
                    TokenContent(request),
                    TokenContent(earlier),
                    min(request.prompt_tokens, earlier.prompt_tokens + earlier.output_tokens),
                )
                for earlier in sent[:index]
            ),
            default=0,
        )
        assert shared[index] == longest


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    workload = Workload.model_validate(
        {
            "sessions": {
                "num_sessions": 40,
                "request_rate": 2.0,
                "turns": 3,
                "prompt_tokens": 100,
                "output_tokens": 50,
                "think_time": 5.0,
                "prefix_group": "system",
                "prefix_tokens": 64,
            }
        }
    )
    sent = build_clients(workload, None)
    write_requests(tmp_path / "chat.csv", sent.requests, sent.after)
    return tmp_path / "chat.csv"


def test_statistics_of_a_chat_trace(chat: Path) -> None:
    found = inspect_trace(TraceReader(chat)).figures()
    assert (found["requests"], found["sessions"]) == (120, 40)
    # Prompts have 164, 314 and 464 tokens. First turns share 64 tokens; later turns share all
    # tokens except 100.
    assert found["prompt_tokens"]["mean"] == 314
    assert found["prefix_hit_rate"] == pytest.approx((39 * 64 + 40 * (214 + 364)) / (120 * 314))
    assert found["hash_blocks"] is None
    assert json.loads(json.dumps(found)) == found


def test_unordered_rows_give_the_same_statistics(chat: Path, tmp_path: Path) -> None:
    header, *rows = chat.read_text().splitlines()
    plain = [",".join(row.split(",")[:3]) for row in rows]
    mixed = tmp_path / "mixed.csv"
    in_order = tmp_path / "in_order.csv"
    header = ",".join(header.split(",")[:3])
    in_order.write_text("\n".join([header, *plain]))
    mixed.write_text("\n".join([header, *plain[60:], *plain[:60]]))
    assert (
        inspect_trace(TraceReader(mixed)).figures()
        == inspect_trace(TraceReader(in_order)).figures()
    )


def test_lengths_without_arrivals_have_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("prompt_tokens,output_tokens\n5,1\n7,2\n")
    found = inspect_trace(TraceReader(path)).figures()
    assert (found["rate"], found["peak_blocks"], found["prefix_hit_rate"]) == (None, None, None)
    assert found["prompt_tokens"]["mean"] == 6


def test_single_request_has_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("arrival,prompt_tokens,output_tokens\n5,17,1\n")
    found = inspect_trace(TraceReader(path)).figures()
    assert (found["rate"], found["requests"], found["peak_blocks"]) == (None, 1, 2)


def test_rejects_a_selection_without_requests(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("arrival,prompt_tokens,output_tokens\n")
    with pytest.raises(InputError, match="the selection contains no requests"):
        inspect_trace(TraceReader(path))


def test_plot_has_the_same_bytes_every_time(chat: Path, tmp_path: Path) -> None:
    from simkv.report.trace_plot import draw_trace

    lengths = tmp_path / "l.csv"
    lengths.write_text("prompt_tokens,output_tokens\n5,1\n")
    for path in (chat, lengths):
        one, two = (
            draw_trace(inspect_trace(TraceReader(path)), "t", tmp_path / name).read_bytes()
            for name in ("a", "b")
        )
        assert one == two
        assert one.startswith(b"\x89PNG")


def test_gaps_and_busiest_seconds(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.2, 5.0, 9.0]
    sent = [Request(i, 5, 1, arrival=time) for i, time in enumerate(times)]
    write_requests(tmp_path / "t.csv", sent, {})
    found = inspect_trace(TraceReader(tmp_path / "t.csv")).figures()
    gaps = np.diff(times)
    assert found["gap_cv"] == pytest.approx(gaps.std() / gaps.mean())
    assert (found["longest_gap_s"], found["most_in_1_s"], found["most_in_64_s"]) == (4.8, 3, 5)
    assert found["rate"] == pytest.approx(5 / 9)
    assert len(read_trace(tmp_path / "t.csv")) == 5
