from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.core.block_keys import TokenContent
from simkv.scenario.scenario import Scenario
from simkv.study.whatif.workload_rows import change_row, list_requests, renumber_rows
from simkv.workload.listed_requests import ListedRequest
from simkv.workload.workload_section import generate_requests
from tests.core.shared_prefixes import common_prefix

SHAPE = {"prompt_tokens": 100, "output_tokens": 10}


def with_workload(workload: dict[str, Any], **fields: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "rows",
            "workload": workload,
            "engine": {"name": "mistralrs"},
            "profile": "unit-step",
            **fields,
        }
    )


@pytest.mark.parametrize(
    "workload",
    [
        {"burst": {"num_prompts": 5, "interval": 0.3, "priority": 2, "max_tokens": 40, **SHAPE}},
        {"burst": {"num_prompts": 3, "prefix_group": "a", "prefix_tokens": 120, **SHAPE}},
        {"burst": {"num_prompts": 3, "has_images": True, "ignore_eos": True, **SHAPE}},
        {
            "arrivals": {
                "num_prompts": 20,
                "request_rate": 2.0,
                "prompt_tokens": {"distribution": "uniform", "low": 5, "high": 90},
                "output_tokens": 3,
                "prefix_groups": 4,
                "prefix_tokens": 30,
                "seed": 3,
            }
        },
        {"requests": [{**SHAPE, "hash_ids": [7, 8], "hash_block_size": 64, "timeout": 3.0}]},
        {"requests": [{**SHAPE, "segments": [["x", 5, 65], ["u0", 0, 40]]}]},
    ],
)
def test_listed_requests_match_workload(workload: dict[str, Any]) -> None:
    scenario = with_workload(workload, timeout=9.0)
    rows = list_requests(scenario, Path())
    again = with_workload({"requests": [*rows.values()]}, timeout=9.0)
    assert list(rows) == list(range(scenario.workload.size))
    assert generate_requests(again.workload, 9.0) == generate_requests(scenario.workload, 9.0)


def test_rows_omit_defaults() -> None:
    rows = list_requests(with_workload({"burst": {"num_prompts": 1, **SHAPE}}, timeout=9.0), Path())
    assert rows[0].model_dump(exclude_defaults=True) == SHAPE


def test_shorter_prompt_is_prefix() -> None:
    forms: list[dict[str, Any]] = [
        {"hash_ids": [1, 2, 3, 4], "hash_block_size": 30},
        {"segments": [("a", 3, 33), ("b", 0, 70)]},
        {"prefix_group": "g", "prefix_tokens": 40},
    ]
    for form in forms:
        long = ListedRequest(**SHAPE, **form)
        for tokens in (99, 61, 60, 59, 31, 30, 29, 1):
            short = change_row(long, prompt_tokens=tokens)
            a, b = (
                TokenContent(
                    generate_requests(with_workload({"requests": [row]}).workload, None)[0]
                )
                for row in (long, short)
            )
            assert short.prompt_tokens == tokens
            assert common_prefix(a, b, tokens) == tokens


def test_renumbering_preserves_streams() -> None:
    rows = [
        ListedRequest(prompt_tokens=10, output_tokens=5),
        ListedRequest(prompt_tokens=15, output_tokens=5, segments=[("u1", 0, 10), ("o1", 0, 5)]),
        ListedRequest(
            prompt_tokens=9, output_tokens=5, segments=[("u4", 0, 4), ("o1", 0, 3), ("ux", 0, 2)]
        ),
    ]
    found = renumber_rows(rows, [1, 4, 9])
    assert found[0] == rows[0]
    assert found[1].segments == [("u0", 0, 10), ("o0", 0, 5)]
    assert found[2].segments == [("u1", 0, 4), ("o0", 0, 3), ("ux", 0, 2)]
    # Without request 1, its token streams belong to no request, in particular not to the new
    # request 1.
    assert renumber_rows(rows[1:], [4, 9])[0].segments == [("gone-u1", 0, 10), ("gone-o1", 0, 5)]
    assert renumber_rows(rows[1:], [4, 9])[1].segments == [
        ("u0", 0, 4),
        ("gone-o1", 0, 3),
        ("ux", 0, 2),
    ]
