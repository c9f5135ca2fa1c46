"""TensorRT-LLM's reuse of blocks, rule by rule; committed recordings tell its rules apart."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from simkv.conformance.decision_replay import check_trace
from simkv.core.errors import InputError
from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import Held
from simkv.schedulers.trtllm import block_reuse
from simkv.schedulers.trtllm.block_reuse import ReusingKvCache
from simkv.schedulers.trtllm.config import TrtllmConfig
from simkv.schedulers.trtllm.llm_request import LlmRequest
from simkv.schedulers.trtllm.scheduler import TrtllmScheduler
from simkv.schedulers.trtllm.spec import TRTLLM
from tests.conformance.recordings import Committed, of_kind

RECORDINGS = of_kind("trtllm", "5f480b7a6", "")


def engine(**knobs: Any) -> TrtllmScheduler:
    """Ten blocks of 4 tokens, without overlap."""
    small: dict[str, Any] = {"tokens_per_block": 4, "max_tokens_in_paged_kv_cache": 40}
    small |= {"disable_overlap_scheduler": True, "max_num_tokens": 40}
    return TrtllmScheduler(TrtllmConfig(**{**small, **knobs}))


def ask(made: TrtllmScheduler, i: int, *pieces: tuple[str, int], most: int = 4) -> None:
    """A request whose prompt begins with so many tokens of each stream."""
    segments = tuple(Segment(stream, 0, tokens) for stream, tokens in pieces)
    made.add(Prompt(i, sum(n for _, n in pieces), most, segments=segments))


def step(made: TrtllmScheduler, *ended: int) -> list[tuple[int, int]]:
    batch = made.schedule()
    made.complete(batch, ended)
    made.pool.check()
    return batch.scheduled


def test_what_is_computed_is_there_for_the_next_but_its_last_token() -> None:
    made = engine()
    ask(made, 0, ("g", 8))
    assert step(made) == [(0, 8)]
    ask(made, 1, ("g", 8))
    ask(made, 2, ("g", 8), ("own", 2))
    # All but the last token: a block that is shared, and a copy of three tokens of the other. It
    # counts two blocks as needed all the same.
    assert step(made) == [(1, 1), (2, 2), (0, 1)]
    assert made.free_blocks == 10 - (3 + 1 + 1)
    assert [made.pool.held(i) for i in range(3)] == [3, 2, 3]


def test_one_waits_for_a_block_that_another_computes() -> None:
    made = engine()
    ask(made, 0, ("g", 9))
    ask(made, 1, ("g", 9))
    batch = made.schedule()
    assert batch.scheduled == [(0, 9)]
    assert batch.held == Held(1, "rule")
    made.complete(batch, ())
    assert step(made) == [(1, 1), (0, 1)]


def test_a_static_batch_waits_for_no_block() -> None:
    made = engine(capacity_scheduler_policy="STATIC_BATCH")
    ask(made, 0, ("g", 9))
    ask(made, 1, ("g", 9))
    assert step(made) == [(0, 9), (1, 9)]


def test_what_was_emitted_is_kept_but_for_the_last_token() -> None:
    made = engine()
    ask(made, 0, ("g", 6))
    step(made)
    step(made)
    step(made, 0)
    assert made.free_blocks == 10
    ask(made, 1, ("g", 6), ("o0", 3), ("own", 3))
    assert step(made) == [(1, 4)]  # 6 and 2 of 3 outputs were there, which is two blocks


def test_the_least_recently_freed_goes_first_and_all_below_it_too() -> None:
    made = engine(max_tokens_in_paged_kv_cache=24)
    ask(made, 0, ("a", 8), most=1)
    step(made, 0)
    ask(made, 1, ("b", 8), most=1)
    step(made, 1)  # two blocks of each are free, of ``a`` first, and two that were never used
    ask(made, 2, ("c", 12), most=1)
    step(made, 2)  # takes those two, and of ``a`` the block that became free first: its second
    ask(made, 3, ("a", 8), most=1)
    assert step(made, 3) == [(3, 4)]
    ask(made, 4, ("b", 8), most=1)
    assert step(made, 4) == [(4, 4)]  # for which the second of ``b`` went


def test_a_chunk_ends_with_a_block_whatever_was_there() -> None:
    made = engine(enable_chunked_prefill=True, max_num_tokens=8)
    ask(made, 0, ("g", 3), most=1)
    step(made, 0)
    ask(made, 1, ("g", 3), ("own", 12))
    assert step(made) == [(1, 5)]  # three were there: to the end of the second block
    assert step(made) == [(1, 7)]


def test_of_a_prompt_that_is_computed_in_part_all_is_taken_for_there() -> None:
    made = engine(enable_chunked_prefill=True, max_num_tokens=8)
    ask(made, 0, ("g", 16))
    assert step(made) == [(0, 8)]
    ask(made, 1, ("g", 16))
    assert (1, 1) in step(made) + step(made)


def _no_part(cache: ReusingKvCache, node: Any, key: Any) -> Any:
    kept = node.children.get(key)
    return (
        (kept, cache.tokens_per_block) if kept and block_reuse._length(kept.key) == 4 else (None, 0)
    )


def _unspoilt(cache: ReusingKvCache, r: LlmRequest, count: int) -> None:
    TAKE(cache, r, count)
    cache._spoilt.clear()


def _all_keyless(cache: ReusingKvCache, r: LlmRequest) -> None:
    cache.pool.release(r.id)


def _whole_blocks(cache: ReusingKvCache, r: LlmRequest) -> None:
    cache._spoilt.discard(r.id)
    if cache.pool.held(r.id):
        cache._keep(r, cache._full(r, r.known - 1))
    cache.pool.release(r.id)


def _forwards(cache: ReusingKvCache, r: LlmRequest) -> None:
    if cache.pool.held(r.id) and r.id not in cache._spoilt:
        cache._keep(r, cache._pieces(r, r.known - 1))
    cache._spoilt.discard(r.id)
    cache.pool.tables.get(r.id, array("i")).reverse()
    cache.pool.release(r.id)


def _begin(r: LlmRequest, reused: int, _: int) -> None:
    r.position = r.reused = reused
    r.chunk = min(r.chunk, r.prompt - reused)


TAKE = ReusingKvCache.take
#: What is changed, and into what: some committed recording must differ.
PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "blocks are shared whole or not at all": (ReusingKvCache, "_best", _no_part),
    "a part is always copied": (ReusingKvCache, "_part", lambda c, r, _: c.take(r, 1)),
    "no waiting": (ReusingKvCache, "waits", lambda *_: False),
    "parts of prompts come unseen": (ReusingKvCache, "coming", lambda *_: set()),
    "what others share comes back": (
        ReusingKvCache,
        "freed",
        lambda c, victims: sum(c.pool.held(r.id) for r in victims),
    ),
    "nothing is spoilt by a pause": (ReusingKvCache, "take", _unspoilt),
    "prompts are kept at the end only": (ReusingKvCache, "store", lambda *_: None),
    "nothing is kept at the end": (ReusingKvCache, "release", _all_keyless),
    "the last block is kept if full": (ReusingKvCache, "release", _whole_blocks),
    "the first block of a request goes first": (ReusingKvCache, "release", _forwards),
    "chunks are not cut to blocks": (LlmRequest, "begin", _begin),
}


@cache
def _reusing() -> list[Committed]:
    """Recordings with reuse of blocks, the small ones first."""
    return [r for r in RECORDINGS if r.trace().header["config"]["enable_block_reuse"]]


def test_so_many_are_committed() -> None:
    assert len(_reusing()) >= 40
    assert sum("aborts" in r.trace().header for r in _reusing()) >= 20


@pytest.mark.parametrize("what", PLANTED)
def test_a_changed_rule_shows_in_a_committed_recording(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PLANTED[what])
    assert any(_differs(recording) for recording in _reusing())


def _differs(recording: Committed) -> bool:
    try:
        return check_trace(recording.trace()).difference is not None
    except Exception:  # it cannot even be replayed
        return True


def test_a_device_copies_no_parts_of_blocks() -> None:
    with pytest.raises(InputError, match="enable_block_reuse: the GPU runner does not copy parts"):
        TRTLLM.build_with_tables(TrtllmConfig())
    TRTLLM.build_with_tables(TrtllmConfig(enable_block_reuse=False))
