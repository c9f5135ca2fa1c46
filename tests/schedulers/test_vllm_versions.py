"""Tests of the differences between older vLLM releases and 0.33.0, in cases computed by hand.

Blocks hold 4 tokens and 8 of them are usable. The expected values were derived from the code of the
releases (see ``simkv.schedulers.vllm.versions``), not from simkv.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from simkv.core.engine_version import is_since, parse_version
from simkv.core.request import Prompt, Segment
from simkv.schedulers.engine_registry import ENGINES, list_variants
from simkv.schedulers.rule_fields import described_rules, differing_rules, rule, rules_in
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_knobs import RELEASED_KNOBS
from simkv.schedulers.vllm.release_rules import NEWEST, VllmRules
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.versions import (
    MINORS,
    RECORDED,
    RELEASED,
    RULES,
    find_equivalent_release,
    find_rules,
    find_variant,
    unrecorded_note,
)
from tests.schedulers.test_vllm import ask, engine, step, steps

VERSIONS = ("0.33.0", "0.19.0", "0.11.0")


def test_every_variant_has_rules_and_source() -> None:
    assert set(RULES) == set(list_variants("vllm"))
    assert RELEASED[0] == NEWEST == VllmConfig.variant
    for version in MINORS.values():
        assert f"({version}, wheel)" in list_variants("vllm")[version].source


@pytest.mark.parametrize(
    ("version", "depth"), [("0.33.0", 2), ("0.19.0", 2), ("0.14", 2), ("0.13", 1), ("0.11.0", 1)]
)
def test_asynchronous_scheduling_is_default_since_0_14(version: Any, depth: int) -> None:
    assert VllmScheduler(VllmConfig(variant=version, max_model_len=64)).pipeline_depth == depth
    for wanted in (True, False):
        config = VllmConfig(variant=version, max_model_len=64, async_scheduling=wanted)
        assert VllmScheduler(config).pipeline_depth == 1 + wanted


@pytest.mark.parametrize(
    ("before", "since", "knob", "value"),
    [
        ("0.11.0", "0.12", "enable_chunked_prefill", False),
        ("0.9.2", "0.10", "policy", "priority"),
        ("0.9.2", "0.10", "async_scheduling", True),
        ("0.18.0", "0.19", "scheduler_reserve_full_isl", True),
        ("0.23.0", "0.24", "watermark", 0.1),
        ("0.25.0", "0.26", "max_num_scheduled_tokens", 16),
        ("0.28.0", "0.29", "max_num_queued_reqs", 2),
        ("0.28.0", "0.29", "max_num_queued_tokens", 16),
        ("0.30.0", "0.31", "max_num_active_seqs", 2),
        ("0.30.0", "0.31", "long_prefill_token_threshold_adaptive", True),
        ("0.32.0", "0.33", "prefill_schedule_interval", 2),
    ],
)
def test_rejects_option_before_its_first_release(
    before: str, since: str, knob: str, value: Any
) -> None:
    engine(variant=since, **{knob: value})
    engine(**{knob: value})
    for version in ("0.9", before):
        with pytest.raises(ValueError, match=rf"^{knob}: .*{version}"):
            engine(variant=version, **{knob: value})


def test_errors_name_first_release_of_option() -> None:
    for knob, (since, *_) in RELEASED_KNOBS.items():
        for release in RELEASED:
            if not is_since(release, since):
                why = RULES[release].fixed[knob].why
                assert re.search(rf"\b{re.escape(since)}\b", why), (knob, why)


def test_release_has_several_names() -> None:
    for name in ("0.27", "0.27.0", "0.27.1", "v0.27", "v0.27.0", "0.27.0+cu128"):
        assert find_variant(name) == "0.27.0"
        assert unrecorded_note(name) is None
        assert find_rules(name) == RULES["0.27.0"]
    assert find_variant("0.11") == find_variant("v0.11.0") == "0.11.0"
    assert find_variant(".".join(NEWEST.split(".")[:2])) == NEWEST
    assert find_variant("0.33.0-skip-blocked") == "0.33.0-skip-blocked"


@pytest.mark.parametrize(
    ("name", "variant"),
    [("0.10.3", "0.10.2"), ("0.27.2", "0.27.0"), ("0.11.7", "0.11.2"), ("0.33.0.post1", "0.33.0")],
)
def test_unrecorded_patch_release_uses_rules_of_previous_recorded_one(
    name: str, variant: str
) -> None:
    assert find_variant(name) == variant
    assert (
        unrecorded_note(name)
        == f"vLLM {name} was not recorded; simulated with the rules of {variant}"
    )


def test_recorded_patch_release_uses_rules_of_its_recordings() -> None:
    own = {"0.9.0.1": "0.9.1", "0.10.1": "0.10.1.1", "0.11.1": "0.11.2", "0.20.2": "0.20.0"}
    for name, variant in own.items():
        assert find_variant(name) == variant
        assert unrecorded_note(name) is None
        # Releases are recorded as equal if no rule starts or ends between them.
        assert rules_in(VllmRules, name) == rules_in(VllmRules, variant)
    assert find_rules("0.11.2") != find_rules("0.11.0") == find_rules("0.11")


@pytest.mark.parametrize(
    "name",
    ["0.5", "0.99", "0.99.0rc1", "1.0.0", "1.27", "0.27.", "0.27.1.2", "0.27rc1", "0.6.0", "", "0"],
)
def test_error_for_unknown_release_lists_known_ones(name: str) -> None:
    known = rf"expected .* from 0\.9 to {next(iter(MINORS))} .*0\.33\.0-skip-blocked"
    with pytest.raises(ValueError, match=known):
        find_variant(name)


def test_one_release_represents_all_with_same_rules() -> None:
    different = ENGINES["vllm"].distinct_variants
    assert {find_equivalent_release(name) for name in RULES} == {*different}
    assert {"0.33.0", "0.20.0", "0.19.0", "0.12.0"} <= {*different}
    rules = [RULES[name] for name in different]
    assert all(a != b for i, a in enumerate(rules) for b in rules[:i])
    assert find_equivalent_release("0.20.1") == "0.20.0"


# Descriptions of rules


def test_every_rule_has_meaning_source_and_existing_names() -> None:
    described = described_rules(VllmRules)
    knobs = set(VllmConfig.__dataclass_fields__)
    for name, each in described.items():
        assert each.meaning, name
        assert each.source, name
        assert {*each.knobs} <= knobs, name
        assert {*each.needs, *each.hidden_by} <= set(described), name


def test_rules_change_at_recorded_releases() -> None:
    """A rule starts and ends at a recorded release, in release order."""
    recorded = [parse_version(name) for name in RECORDED]
    for name, each in described_rules(VllmRules).items():
        starts = [parse_version(start) for start in each.changes]
        assert starts == sorted(starts), name
        for start in starts:
            assert start in recorded, name


def test_rules_follow_from_since_and_until() -> None:
    @dataclass(frozen=True)
    class Rules:
        always_before: bool = rule("Steps", "Holds before 0.11.", until="0.11")
        between: bool = rule("Steps", "Holds for a while.", since="0.10.1", until="0.34")
        never: bool = rule("Steps", "Holds in no release.")
        values: str = rule("Steps", "A name.", values={"0.9": "old", "1.0": "new"})

    assert Rules() == Rules(always_before=True, between=False, never=False, values="old")
    assert rules_in(Rules, "0.9.1") == Rules()
    assert rules_in(Rules, "0.10.0") == Rules()
    assert rules_in(Rules, "v0.10.2") == Rules(between=True)
    assert rules_in(Rules, "0.33.0.post1") == Rules(always_before=False, between=True)
    # A pre-release has the rules of its release; 1.0 follows 0.34.
    assert rules_in(Rules, "0.34.0rc1") == Rules(always_before=False)
    assert rules_in(Rules, "1.0.0") == Rules(always_before=False, values="new")
    assert differing_rules(rules_in(Rules, "0.33"), rules_in(Rules, "0.34")) == ["between"]


@pytest.mark.parametrize(("version", "tokens"), [("0.27.0", 14), ("0.28.0", 10)])
def test_scheduled_tokens_limit_replaces_batched_tokens_limit_before_0_28(
    version: str, tokens: int
) -> None:
    budgets = {"max_num_batched_tokens": 10, "max_num_scheduled_tokens": 14}
    scheduler = engine([ask(0, 20)], variant=version, **budgets)
    assert step(scheduler).scheduled == [(0, tokens)]
    budgets["max_num_scheduled_tokens"] = 6
    scheduler = engine([ask(0, 20)], variant=version, **budgets)
    assert step(scheduler).scheduled == [(0, 6)]


# Admission


@pytest.mark.parametrize(
    ("version", "admitted"),
    [("0.33.0", [(0, 16)]), ("0.19.0", [(0, 16)]), ("0.11.0", [(0, 16), (1, 8)])],
)
def test_whole_prompt_or_first_chunk_must_fit(version: str, admitted: list[Any]) -> None:
    # 24 tokens per step, including 16 for request 0. Its 4 blocks leave 4 blocks free, and request
    # 1 needs 5.
    scheduler = engine([ask(0, 16), ask(1, 20)], variant=version, max_num_batched_tokens=24)
    assert step(scheduler).scheduled == admitted


def test_reserve_full_isl_can_be_disabled_in_0_19() -> None:
    knobs = {"variant": "0.19.0", "max_num_batched_tokens": 24, "scheduler_reserve_full_isl": False}
    assert step(engine([ask(0, 16), ask(1, 20)], **knobs)).scheduled == [(0, 16), (1, 8)]


@pytest.mark.parametrize(("version", "tokens"), [("0.33.0", 12), ("0.19.0", 4), ("0.11.0", 4)])
def test_threshold_does_not_apply_to_only_request_since_0_33(version: str, tokens: int) -> None:
    scheduler = engine([ask(0, 12)], variant=version, long_prefill_token_threshold=4)
    assert step(scheduler).scheduled == [(0, tokens)]


@pytest.mark.parametrize("version", [*VERSIONS[1:], "0.26"])
def test_threshold_may_exceed_max_model_len_before_0_27(version: str) -> None:
    engine(variant=version, long_prefill_token_threshold=33)
    with pytest.raises(ValueError, match="at most max_model_len 32"):
        engine(variant="0.27", long_prefill_token_threshold=33)


@pytest.mark.parametrize("version", [*VERSIONS[1:], "0.28"])
def test_start_up_check_ignores_null_block_before_0_29(version: str) -> None:
    for since in ("0.29", "0.33"):
        with pytest.raises(ValueError, match="less the null block, hold 28 tokens"):
            engine(variant=since, num_gpu_blocks=8)
    scheduler = engine([ask(0, 27)], variant=version, num_gpu_blocks=8)
    emitting = [b.emits for b in steps(scheduler, 5)]
    assert emitting == [[0], [0], [], [], []]  # token 29 needs an eighth block
    with pytest.raises(ValueError, match="of 4 tokens hold 28 tokens"):
        engine(variant=version, num_gpu_blocks=7)


# Free queue


@pytest.mark.parametrize(("version", "hit"), [("0.33.0", 8), ("0.19.0", 4), ("0.11.0", 4)])
def test_freed_uncached_blocks_are_reused_first_or_last(version: str, hit: int) -> None:
    scheduler = engine(variant=version, enable_prefix_caching=True)

    def serve(i: int, tokens: int, stream: str) -> int:
        scheduler.add(Prompt(i, tokens, 1, segments=(Segment(stream, 0, tokens),)))
        return step(scheduler).context[0]

    # blocks 1 and 2 are cached: they are queued after 3 to 8, block 2 before block 1
    serve(0, 8, "a")
    serve(1, 3, "b")  # block 3 is not cached: it is queued before block 4, or after block 1
    serve(2, 24, "c")  # 6 blocks: 3 to 8, or 4 to 8 and block 2
    assert serve(3, 9, "a") == hit


# Preemption


def thrash(version: str) -> list[list[tuple[int, int]]]:
    """Run 8 tokens per step with a prompt of 12 tokens, and a prompt of 20 whose last chunk lacks
    blocks.
    """
    scheduler = engine([ask(0, 12), ask(1, 20)], variant=version, max_num_batched_tokens=8)
    return [b.scheduled for b in steps(scheduler, 9)]


UNTIL_PREEMPTION = [
    [(0, 8)],  # request 0 holds 2 blocks
    [(0, 4), (1, 4)],  # 3 blocks and 1 block; all 5 blocks of request 1 would fit
    [(0, 1), (1, 7)],  # 4 and 3 blocks
    [(0, 1)],  # request 1 needs 2 blocks, and 1 is free: request 1 preempts itself
]


def test_release_0_19_waits_for_blocks_of_whole_prompt() -> None:
    # Request 1 needs 5 blocks; 4 are free, and 3 after request 0 gets its fifth block.
    assert thrash("0.19.0") == [*UNTIL_PREEMPTION, *[[(0, 1)]] * 5]


def test_release_0_11_readmits_first_chunk_repeatedly() -> None:
    assert thrash("0.11.0") == [
        *UNTIL_PREEMPTION,
        [(0, 1), (1, 7)],  # 4 and 2 blocks, 2 free
        [(0, 1), (1, 7)],  # 4 and 4 blocks, none free
        [(0, 1)],  # request 0 needs a fifth block and preempts request 1; 3 free
        [(0, 1), (1, 7)],  # 5 and 2 blocks, 1 free
        [(0, 1)],  # request 1 needs 2 blocks and preempts itself
    ]


@pytest.mark.parametrize(("version", "scheduled"), [("0.33.0", [(1, 1)]), ("0.19.0", [])])
def test_requests_after_self_preemption_run_or_are_skipped(
    version: str, scheduled: list[Any]
) -> None:
    scheduler = engine(variant=version, policy="priority")
    for prompt in (ask(0, 14, priority=1), ask(1, 15)):
        scheduler.add(prompt)
        step(scheduler)
    step(scheduler)  # both requests have filled 4 blocks
    batch = step(scheduler)
    assert (batch.preempted, batch.scheduled) == ([0], scheduled)
    assert batch.aside == {i: "rule" for i in (1,) if not scheduled}
    assert step(scheduler).scheduled == [(1, 1)]


@pytest.mark.parametrize(
    ("version", "scheduled"), [("0.12", [(1, 1), (2, 1)]), ("0.11", [(0, 1), (1, 1)])]
)
def test_victim_that_was_scheduled_leaves_batch_since_0_12(
    version: str, scheduled: list[Any]
) -> None:
    """In 0.11 the victim stays in the batch, and the request after the preempting one is
    skipped."""
    scheduler = engine(variant=version, policy="priority")
    scheduler.add(ask(0, 13, priority=9))  # 4 blocks
    step(scheduler)
    for prompt in (ask(1, 8, at=1), ask(2, 6, 3, at=2)):  # 2 blocks each
        scheduler.add(prompt)
    step(scheduler)
    batch = step(scheduler)  # request 1 needs a third block
    assert (batch.preempted, batch.scheduled) == ([0], scheduled)
    scheduler.abort(1)
    scheduler.abort(2)
    # Request 0 has 15 tokens and no block; in 0.11 one token counts as computed.
    assert step(scheduler).rows() == [(0, 15, 0) if version == "0.12" else (0, 14, 1)]


@pytest.mark.parametrize(("version", "crashes"), [("0.11", True), ("0.12", False)])
def test_equal_priority_and_arrival_crash_before_0_12(version: str, crashes: bool) -> None:
    assert (
        not engine([ask(0, 4), ask(1, 4, at=1)], variant=version, policy="priority")
        .schedule()
        .fatal
    )
    fatal = engine([ask(0, 4), ask(1, 4)], variant=version, policy="priority").schedule().fatal
    assert fatal == (
        "TypeError: two waiting requests of equal priority and arrival" if crashes else None
    )


@pytest.mark.parametrize(
    ("version", "scheduled"), [("0.33.0", [(1, 1), (2, 1)]), ("0.19.0", [(1, 1)])]
)
def test_request_after_unscheduled_victim_runs_or_is_skipped(
    version: str, scheduled: list[Any]
) -> None:
    scheduler = engine(variant=version, policy="priority", async_scheduling=True)
    scheduler.add(ask(0, 15, max_tokens=2, priority=9))  # 4 blocks
    in_flight = [scheduler.schedule()]
    for prompt in (ask(1, 8), ask(2, 5)):  # 2 blocks each
        scheduler.add(prompt)
    in_flight.append(scheduler.schedule())
    assert in_flight[1].scheduled == [(0, 1), (1, 8), (2, 5)]
    scheduler.complete(in_flight.pop(0), ())
    # the last token of request 0 is in flight; request 1 needs a third block
    batch = scheduler.schedule()
    assert (batch.preempted, batch.scheduled) == ([0], scheduled)
    assert scheduler.complete(in_flight.pop(0), ()).finished == [0]  # request 0 ends while it waits
    assert scheduler.schedule().scheduled == [(1, 1), (2, 1)]


# Asynchronous scheduling


@pytest.mark.parametrize(("version", "third"), [("0.19.0", []), ("0.11.0", [(0, 1)])])
def test_extra_step_after_last_token_in_0_11(version: str, third: list[Any]) -> None:
    scheduler = engine([ask(0, 4, max_tokens=2)], variant=version, async_scheduling=True)
    batches = [scheduler.schedule() for _ in range(2)]
    scheduler.complete(batches[0], ())
    batches.append(scheduler.schedule())
    assert [b.scheduled for b in batches] == [[(0, 4)], [(0, 1)], third]
    assert scheduler.complete(batches[1], ()).finished == [0]
    assert scheduler.complete(batches[2], ()).delivered == []
    assert scheduler.free_blocks == 8


@pytest.mark.parametrize("version", VERSIONS)
def test_no_step_after_max_model_len(version: str) -> None:
    scheduler = engine([ask(0, 30)], variant=version, async_scheduling=True)
    batches = [scheduler.schedule() for _ in range(2)]
    scheduler.complete(batches[0], ())
    assert not scheduler.schedule()


# Rules of all versions


@pytest.mark.parametrize("version", VERSIONS)
def test_no_admission_in_step_with_preemption(version: str) -> None:
    scheduler = engine([ask(0, 16), ask(1, 16), ask(2, 4)], variant=version)
    assert step(scheduler).scheduled == [(0, 16), (1, 16)]
    batch = step(scheduler)
    assert (batch.preempted, batch.scheduled) == ([1], [(0, 1)])
    # request 1 is at the front, although 3 blocks are free for request 2
    assert scheduler.waiting_ids() == [1, 2]


@pytest.mark.parametrize("version", VERSIONS)
def test_fully_cached_prompt_recomputes_last_block(version: str) -> None:
    scheduler = engine(variant=version, enable_prefix_caching=True)
    for i in range(2):
        scheduler.add(Prompt(i, 8, 1, segments=(Segment("g", 0, 8),)))
        batch = step(scheduler)
    assert (batch.scheduled, batch.context) == ([(1, 4)], [4])
