"""What older releases of vLLM do otherwise than 0.33.0, each in a case worked out by hand.

Blocks hold 4 tokens and 8 of them can be used. What is expected was derived from the code of the
versions (see ``simkv.schedulers.vllm.versions``), not from simkv.
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


def test_every_variant_has_rules_and_a_source() -> None:
    assert set(RULES) == set(list_variants("vllm"))
    assert RELEASED[0] == NEWEST == VllmConfig.variant
    for version in MINORS.values():
        assert f"({version}, wheel)" in list_variants("vllm")[version].source


@pytest.mark.parametrize(
    ("version", "depth"), [("0.33.0", 2), ("0.19.0", 2), ("0.14", 2), ("0.13", 1), ("0.11.0", 1)]
)
def test_asynchronous_by_default(version: Any, depth: int) -> None:
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
def test_a_knob_is_refused_before_the_release_that_brought_it(
    before: str, since: str, knob: str, value: Any
) -> None:
    engine(variant=since, **{knob: value})
    engine(**{knob: value})
    for version in ("0.9", before):
        with pytest.raises(ValueError, match=rf"^{knob}: .*{version}"):
            engine(variant=version, **{knob: value})


def test_refusals_name_the_release_that_added_the_knob() -> None:
    for knob, (since, *_) in RELEASED_KNOBS.items():
        for release in RELEASED:
            if not is_since(release, since):
                why = RULES[release].fixed[knob].why
                assert re.search(rf"\b{re.escape(since)}\b", why), (knob, why)


def test_one_release_has_several_names() -> None:
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
def test_unrecorded_patch_releases_have_the_rules_of_the_recorded_one_before(
    name: str, variant: str
) -> None:
    assert find_variant(name) == variant
    assert (
        unrecorded_note(name)
        == f"vLLM {name} was not recorded; simulated with the rules of {variant}"
    )


def test_recorded_patch_releases_have_the_rules_of_their_recordings() -> None:
    own = {"0.9.0.1": "0.9.1", "0.10.1": "0.10.1.1", "0.11.1": "0.11.2", "0.20.2": "0.20.0"}
    for name, variant in own.items():
        assert find_variant(name) == variant
        assert unrecorded_note(name) is None
        # Recorded as equal means that no rule starts or ends between them.
        assert rules_in(VllmRules, name) == rules_in(VllmRules, variant)
    assert find_rules("0.11.2") != find_rules("0.11.0") == find_rules("0.11")


@pytest.mark.parametrize(
    "name",
    ["0.5", "0.99", "0.99.0rc1", "1.0.0", "1.27", "0.27.", "0.27.1.2", "0.27rc1", "0.6.0", "", "0"],
)
def test_rejects_unknown_releases_with_the_known_ones(name: str) -> None:
    known = rf"is not known; .* from 0\.9 to {next(iter(MINORS))} .*0\.33\.0-skip-blocked"
    with pytest.raises(ValueError, match=known):
        find_variant(name)


def test_one_release_stands_for_all_with_the_same_rules() -> None:
    different = ENGINES["vllm"].distinct_variants
    assert {find_equivalent_release(name) for name in RULES} == {*different}
    assert {"0.33.0", "0.19.0", "0.12.0"} <= {*different}
    rules = [RULES[name] for name in different]
    assert all(a != b for i, a in enumerate(rules) for b in rules[:i])
    assert find_equivalent_release("0.20.1") == "0.19.0"


# The description of the rules


def test_every_rule_has_a_meaning_a_source_and_existing_names() -> None:
    described = described_rules(VllmRules)
    knobs = set(VllmConfig.__dataclass_fields__)
    for name, each in described.items():
        assert each.meaning, name
        assert each.source, name
        assert {*each.knobs} <= knobs, name
        assert {*each.needs, *each.hidden_by} <= set(described), name


def test_changes_of_rules_are_between_recorded_releases() -> None:
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
def test_two_budgets_or_one_in_place_of_the_other(version: str, tokens: int) -> None:
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
def test_the_whole_prompt_or_its_first_chunk_must_fit(version: str, admitted: list[Any]) -> None:
    # 24 tokens in a step: 16 for the first, whose 4 blocks leave 4 of the 5 that the second needs.
    scheduler = engine([ask(0, 16), ask(1, 20)], variant=version, max_num_batched_tokens=24)
    assert step(scheduler).scheduled == admitted


def test_the_gate_of_0_19_can_be_switched_off() -> None:
    knobs = {"variant": "0.19.0", "max_num_batched_tokens": 24, "scheduler_reserve_full_isl": False}
    assert step(engine([ask(0, 16), ask(1, 20)], **knobs)).scheduled == [(0, 16), (1, 8)]


@pytest.mark.parametrize(("version", "tokens"), [("0.33.0", 12), ("0.19.0", 4), ("0.11.0", 4)])
def test_the_threshold_spares_a_lone_request_since_0_33(version: str, tokens: int) -> None:
    scheduler = engine([ask(0, 12)], variant=version, long_prefill_token_threshold=4)
    assert step(scheduler).scheduled == [(0, tokens)]


@pytest.mark.parametrize("version", [*VERSIONS[1:], "0.26"])
def test_the_threshold_may_exceed_the_longest_sequence(version: str) -> None:
    engine(variant=version, long_prefill_token_threshold=33)
    with pytest.raises(ValueError, match="at most max_model_len 32"):
        engine(variant="0.27", long_prefill_token_threshold=33)


@pytest.mark.parametrize("version", [*VERSIONS[1:], "0.28"])
def test_start_up_forgets_the_null_block(version: str) -> None:
    for since in ("0.29", "0.33"):
        with pytest.raises(ValueError, match="less the null block, hold 28 tokens"):
            engine(variant=since, num_gpu_blocks=8)
    scheduler = engine([ask(0, 27)], variant=version, num_gpu_blocks=8)
    emitting = [b.emits for b in steps(scheduler, 5)]
    assert emitting == [[0], [0], [], [], []]  # its 29th token needs an eighth block
    with pytest.raises(ValueError, match="of 4 tokens hold 28 tokens"):
        engine(variant=version, num_gpu_blocks=7)


# The free list


@pytest.mark.parametrize(("version", "hit"), [("0.33.0", 8), ("0.19.0", 4), ("0.11.0", 4)])
def test_where_freed_blocks_without_a_key_go(version: str, hit: int) -> None:
    scheduler = engine(variant=version, enable_prefix_caching=True)

    def serve(i: int, tokens: int, stream: str) -> int:
        scheduler.add(Prompt(i, tokens, 1, segments=(Segment(stream, 0, tokens),)))
        return step(scheduler).context[0]

    serve(0, 8, "a")  # blocks 1 and 2, with keys: queued behind 3 to 8, the tail 2 before 1
    serve(1, 3, "b")  # block 3, without a key: in front of 4 again, or behind 1
    serve(2, 24, "c")  # 6 blocks: 3 to 8, or 4 to 8 and then the tail of the first
    assert serve(3, 9, "a") == hit


# Preemption


def thrash(version: str) -> list[list[tuple[int, int]]]:
    """8 tokens a step; a prompt of 12, and one of 20 whose last chunk finds no blocks."""
    scheduler = engine([ask(0, 12), ask(1, 20)], variant=version, max_num_batched_tokens=8)
    return [b.scheduled for b in steps(scheduler, 9)]


UNTIL_PREEMPTION = [
    [(0, 8)],  # 2 blocks
    [(0, 4), (1, 4)],  # 3 and 1; all 5 blocks of the second would still fit
    [(0, 1), (1, 7)],  # 4 and 3
    [(0, 1)],  # the second needs 2 blocks for its next 7 tokens and there is 1: it preempts itself
]


def test_trace_0_19_waits_for_room_for_the_whole_prompt() -> None:
    # 4 blocks are free and it needs 5; one less from the time that the first takes its fifth.
    assert thrash("0.19.0") == [*UNTIL_PREEMPTION, *[[(0, 1)]] * 5]


def test_trace_0_11_admits_the_first_chunk_again_and_again() -> None:
    assert thrash("0.11.0") == [
        *UNTIL_PREEMPTION,
        [(0, 1), (1, 7)],  # 4 and 2, 2 are free
        [(0, 1), (1, 7)],  # 4 and 4, none is free
        [(0, 1)],  # the first needs its fifth: the second is preempted, and 3 are free
        [(0, 1), (1, 7)],  # 5 and 2, 1 is free
        [(0, 1)],  # the second needs 2: it preempts itself
    ]


@pytest.mark.parametrize(("version", "scheduled"), [("0.33.0", [(1, 1)]), ("0.19.0", [])])
def test_who_is_behind_one_that_preempts_itself(version: str, scheduled: list[Any]) -> None:
    scheduler = engine(variant=version, policy="priority")
    for prompt in (ask(0, 14, priority=1), ask(1, 15)):
        scheduler.add(prompt)
        step(scheduler)
    step(scheduler)  # both have filled 4 blocks
    batch = step(scheduler)
    assert (batch.preempted, batch.scheduled) == ([0], scheduled)
    assert batch.aside == {i: "rule" for i in (1,) if not scheduled}
    assert step(scheduler).scheduled == [(1, 1)]


@pytest.mark.parametrize(
    ("version", "scheduled"), [("0.12", [(1, 1), (2, 1)]), ("0.11", [(0, 1), (1, 1)])]
)
def test_a_victim_that_was_scheduled_already(version: str, scheduled: list[Any]) -> None:
    """In 0.11 it stays in the batch, and whoever is behind the one that took its blocks waits."""
    scheduler = engine(variant=version, policy="priority")
    scheduler.add(ask(0, 13, priority=9))  # 4 blocks
    step(scheduler)
    for prompt in (ask(1, 8, at=1), ask(2, 6, 3, at=2)):  # 2 blocks each
        scheduler.add(prompt)
    step(scheduler)
    batch = step(scheduler)  # 1 needs its third
    assert (batch.preempted, batch.scheduled) == ([0], scheduled)
    scheduler.abort(1)
    scheduler.abort(2)
    # 15 tokens are known and no block is held; one counts as computed in 0.11.
    assert step(scheduler).rows() == [(0, 15, 0) if version == "0.12" else (0, 14, 1)]


@pytest.mark.parametrize(("version", "dies"), [("0.11", True), ("0.12", False)])
def test_requests_of_equal_priority_and_arrival(version: str, dies: bool) -> None:
    assert (
        not engine([ask(0, 4), ask(1, 4, at=1)], variant=version, policy="priority")
        .schedule()
        .fatal
    )
    fatal = engine([ask(0, 4), ask(1, 4)], variant=version, policy="priority").schedule().fatal
    assert fatal == (
        "TypeError: two waiting requests of equal priority and arrival" if dies else None
    )


@pytest.mark.parametrize(
    ("version", "scheduled"), [("0.33.0", [(1, 1), (2, 1)]), ("0.19.0", [(1, 1)])]
)
def test_who_is_next_when_the_victim_had_sat_out(version: str, scheduled: list[Any]) -> None:
    scheduler = engine(variant=version, policy="priority", async_scheduling=True)
    scheduler.add(ask(0, 15, max_tokens=2, priority=9))  # 4 blocks
    under_way = [scheduler.schedule()]
    for prompt in (ask(1, 8), ask(2, 5)):  # 2 blocks each
        scheduler.add(prompt)
    under_way.append(scheduler.schedule())
    assert under_way[1].scheduled == [(0, 1), (1, 8), (2, 5)]
    scheduler.complete(under_way.pop(0), ())
    batch = scheduler.schedule()  # the last token of 0 is under way; 1 needs its third block
    assert (batch.preempted, batch.scheduled) == ([0], scheduled)
    assert scheduler.complete(under_way.pop(0), ()).finished == [0]  # while it waits
    assert scheduler.schedule().scheduled == [(1, 1), (2, 1)]


# Asynchronous scheduling


@pytest.mark.parametrize(("version", "third"), [("0.19.0", []), ("0.11.0", [(0, 1)])])
def test_a_step_past_the_last_token(version: str, third: list[Any]) -> None:
    scheduler = engine([ask(0, 4, max_tokens=2)], variant=version, async_scheduling=True)
    batches = [scheduler.schedule() for _ in range(2)]
    scheduler.complete(batches[0], ())
    batches.append(scheduler.schedule())
    assert [b.scheduled for b in batches] == [[(0, 4)], [(0, 1)], third]
    assert scheduler.complete(batches[1], ()).finished == [0]
    assert scheduler.complete(batches[2], ()).delivered == []
    assert scheduler.free_blocks == 8


@pytest.mark.parametrize("version", VERSIONS)
def test_no_step_past_the_longest_sequence(version: str) -> None:
    scheduler = engine([ask(0, 30)], variant=version, async_scheduling=True)
    batches = [scheduler.schedule() for _ in range(2)]
    scheduler.complete(batches[0], ())
    assert not scheduler.schedule()


# The same in all versions


@pytest.mark.parametrize("version", VERSIONS)
def test_nobody_is_admitted_in_a_step_that_preempted(version: str) -> None:
    scheduler = engine([ask(0, 16), ask(1, 16), ask(2, 4)], variant=version)
    assert step(scheduler).scheduled == [(0, 16), (1, 16)]
    batch = step(scheduler)
    assert (batch.preempted, batch.scheduled) == ([1], [(0, 1)])
    assert scheduler.waiting_ids() == [1, 2]  # at the very front, with 3 blocks free for 2


@pytest.mark.parametrize("version", VERSIONS)
def test_at_least_one_token_is_computed_again(version: str) -> None:
    scheduler = engine(variant=version, enable_prefix_caching=True)
    for i in range(2):
        scheduler.add(Prompt(i, 8, 1, segments=(Segment("g", 0, 8),)))
        batch = step(scheduler)
    assert (batch.scheduled, batch.context) == ([(1, 4)], [4])
