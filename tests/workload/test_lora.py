"""Tests of LoRA adapters of requests: listed, sampled, and in traces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from simkv.workload.formats.simkv_csv import used_columns, write_file
from simkv.workload.trace_reader import read_trace
from simkv.workload.trace_selection import Selection
from simkv.workload.trace_source import TraceSource
from simkv.workload.workload_section import Workload, build_clients, generate_requests


def drawn(**more: object) -> list[str | None]:
    arrivals = {"num_prompts": 400, "request_rate": 5.0, "prompt_tokens": 8, "output_tokens": 2}
    workload = Workload.model_validate({"arrivals": arrivals | more})
    return [request.lora for request in generate_requests(workload, None)]


def test_adapters_are_sampled_evenly_or_assigned_in_turn() -> None:
    assert drawn() == [None] * 400
    assert drawn(lora="a") == ["a"] * 400
    counts = Counter(drawn(lora_modules=["a", "b", "b", "c"]))
    assert {name: round(count, -2) for name, count in counts.items()} == {
        "a": 100,
        "b": 200,
        "c": 100,
    }
    in_turn = drawn(lora_modules=["a", "b", "c"], lora_assignment="round-robin")
    assert in_turn[:5] == ["a", "b", "c", "a", "b"]


def test_sampling_adapters_changes_no_other_samples() -> None:
    arrivals: dict[str, object] = {
        "num_prompts": 50,
        "request_rate": 5.0,
        "prompt_tokens": {"distribution": "lognormal", "mean": 64},
        "output_tokens": 2,
    }
    plain = generate_requests(Workload.model_validate({"arrivals": arrivals}), None)
    asking = generate_requests(
        Workload.model_validate({"arrivals": arrivals | {"lora_modules": ["a"]}}), None
    )
    assert [(r.arrival, r.prompt_tokens) for r in plain] == [
        (r.arrival, r.prompt_tokens) for r in asking
    ]


def test_rejects_lora_together_with_lora_modules() -> None:
    with pytest.raises(ValidationError, match="lora and lora_modules"):
        drawn(lora="a", lora_modules=["a"])


def test_all_turns_of_a_session_use_one_adapter() -> None:
    sessions = {"num_sessions": 9, "request_rate": 1.0, "turns": 3, "prompt_tokens": 8}
    sessions |= {"output_tokens": 2, "lora_modules": ["a", "b", "c"]}
    found: dict[str, set[str | None]] = {}
    for request in build_clients(Workload.model_validate({"sessions": sessions}), None).requests:
        found.setdefault(request.segments[0].stream, set()).add(request.lora)
    assert all(len(loras) == 1 for loras in found.values())


def test_trace_stores_adapter_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,lora\n0,5,2,a\n1,5,2,\n2,5,2,b%2Cc\n")
    trace = read_trace(path)
    assert [request.lora for request in trace.requests()] == ["a", None, "b,c"]
    source = TraceSource(path, Selection())
    source.loras.names = trace.loras
    again = tmp_path / "again.csv"
    write_file(again, [trace.rows], used_columns(trace.rows, ["arrival"]), source)
    assert [r.lora for r in read_trace(again).requests()] == ["a", None, "b,c"]
