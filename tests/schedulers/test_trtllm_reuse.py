"""Tests of block reuse in TensorRT-LLM, rule by rule; committed recordings confirm each rule."""

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
    """Build an engine with ten blocks of 4 tokens, without overlap."""
    small: dict[str, Any] = {"tokens_per_block": 4, "max_tokens_in_paged_kv_cache": 40}
    small |= {"disable_overlap_scheduler": True, "max_num_tokens": 40}
    return TrtllmScheduler(TrtllmConfig(**{**small, **knobs}))


def ask(made: TrtllmScheduler, i: int, *pieces: tuple[str, int], most: int = 4) -> None:
    """Add a request whose prompt consists of the given number of tokens of each stream."""
    segments = tuple(Segment(stream, 0, tokens) for stream, tokens in pieces)
    made.add(Prompt(i, sum(n for _, n in pieces), most, segments=segments))


def step(made: TrtllmScheduler, *ended: int) -> list[tuple[int, int]]:
    batch = made.schedule()
    made.complete(batch, ended)
    made.pool.check()
    return batch.scheduled


def test_computed_prompt_is_reused_except_last_token() -> None:
    made = engine()
    ask(made, 0, ("g", 8))
    assert step(made) == [(0, 8)]
    ask(made, 1, ("g", 8))
    ask(made, 2, ("g", 8), ("own", 2))
    # Request 1 reuses all tokens except the last: it shares a block and copies three tokens of
    # another block. Admission still counts two blocks for this request.
    assert step(made) == [(1, 1), (2, 2), (0, 1)]
    assert made.free_blocks == 10 - (3 + 1 + 1)
    assert [made.pool.held(i) for i in range(3)] == [3, 2, 3]


def test_request_waits_for_block_being_computed() -> None:
    made = engine()
    ask(made, 0, ("g", 9))
    ask(made, 1, ("g", 9))
    batch = made.schedule()
    assert batch.scheduled == [(0, 9)]
    assert batch.held == Held(1, "rule")
    made.complete(batch, ())
    assert step(made) == [(1, 1), (0, 1)]


def test_static_batch_does_not_wait_for_blocks() -> None:
    made = engine(capacity_scheduler_policy="STATIC_BATCH")
    ask(made, 0, ("g", 9))
    ask(made, 1, ("g", 9))
    assert step(made) == [(0, 9), (1, 9)]


def test_outputs_are_cached_except_last_token() -> None:
    made = engine()
    ask(made, 0, ("g", 6))
    step(made)
    step(made)
    step(made, 0)
    assert made.free_blocks == 10
    ask(made, 1, ("g", 6), ("o0", 3), ("own", 3))
    assert step(made) == [(1, 4)]  # 6 prompt tokens and 2 of 3 outputs are cached: two blocks


def test_evicts_least_recently_freed_block_with_descendants() -> None:
    made = engine(max_tokens_in_paged_kv_cache=24)
    ask(made, 0, ("a", 8), most=1)
    step(made, 0)
    ask(made, 1, ("b", 8), most=1)
    step(made, 1)  # free blocks in order: two unused blocks, two of ``a``, two of ``b``
    ask(made, 2, ("c", 12), most=1)
    step(made, 2)  # takes the unused blocks and the second block of ``a``
    ask(made, 3, ("a", 8), most=1)
    assert step(made, 3) == [(3, 4)]
    ask(made, 4, ("b", 8), most=1)
    assert step(made, 4) == [(4, 4)]  # the second block of ``b`` was evicted for request 3


def test_chunk_after_partial_reuse_ends_at_block_border() -> None:
    made = engine(enable_chunked_prefill=True, max_num_tokens=8)
    ask(made, 0, ("g", 3), most=1)
    step(made, 0)
    ask(made, 1, ("g", 3), ("own", 12))
    assert step(made) == [(1, 5)]  # three tokens are cached; the chunk ends with the second block
    assert step(made) == [(1, 7)]


def test_partly_computed_prompt_counts_as_cached() -> None:
    made = engine(enable_chunked_prefill=True, max_num_tokens=8)
    ask(made, 0, ("g", 16))
    assert step(made) == [(0, 8)]
    ask(made, 1, ("g", 16))
    assert (1, 1) in step(made) + step(made)


def _without_partial_matches(cache: ReusingKvCache, node: Any, key: Any) -> Any:
    kept = node.children.get(key)
    return (
        (kept, cache.tokens_per_block) if kept and block_reuse._length(kept.key) == 4 else (None, 0)
    )


def _without_spoilt_requests(cache: ReusingKvCache, r: LlmRequest, count: int) -> None:
    TAKE(cache, r, count)
    cache._spoilt.clear()


def _release_without_caching(cache: ReusingKvCache, r: LlmRequest) -> None:
    cache.pool.release(r.id)


def _cache_full_blocks_only(cache: ReusingKvCache, r: LlmRequest) -> None:
    cache._spoilt.discard(r.id)
    if cache.pool.held(r.id):
        cache._keep(r, cache._full(r, r.known - 1))
    cache.pool.release(r.id)


def _free_in_table_order(cache: ReusingKvCache, r: LlmRequest) -> None:
    if cache.pool.held(r.id) and r.id not in cache._spoilt:
        cache._keep(r, cache._pieces(r, r.known - 1))
    cache._spoilt.discard(r.id)
    cache.pool.tables.get(r.id, array("i")).reverse()
    cache.pool.release(r.id)


def _begin_without_block_border(r: LlmRequest, reused: int, _: int) -> None:
    r.position = r.reused = reused
    r.chunk = min(r.chunk, r.prompt - reused)


TAKE = ReusingKvCache.take
#: Changed rules; for each, at least one committed recording must differ.
PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "no partial matches": (ReusingKvCache, "_best", _without_partial_matches),
    "partial match is always copied": (ReusingKvCache, "_part", lambda c, r, _: c.take(r, 1)),
    "does not wait for blocks": (ReusingKvCache, "waits", lambda *_: False),
    "partly computed prompts are ignored": (ReusingKvCache, "coming", lambda *_: set()),
    "shared blocks count as freed": (
        ReusingKvCache,
        "freed",
        lambda c, victims: sum(c.pool.held(r.id) for r in victims),
    ),
    "pause does not prevent caching": (ReusingKvCache, "take", _without_spoilt_requests),
    "prompts are cached only at the end": (ReusingKvCache, "store", lambda *_: None),
    "nothing is cached at the end": (ReusingKvCache, "release", _release_without_caching),
    "last block is cached only if full": (ReusingKvCache, "release", _cache_full_blocks_only),
    "first block is evicted first": (ReusingKvCache, "release", _free_in_table_order),
    "chunks do not end at block borders": (LlmRequest, "begin", _begin_without_block_border),
}


@cache
def _reusing() -> list[Committed]:
    """Return the recordings with block reuse, the smallest first."""
    return [r for r in RECORDINGS if r.trace().header["config"]["enable_block_reuse"]]


def test_enough_recordings_are_committed() -> None:
    assert len(_reusing()) >= 40
    assert sum("aborts" in r.trace().header for r in _reusing()) >= 20


@pytest.mark.parametrize("what", PLANTED)
def test_changed_rule_differs_from_recordings(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[what])
    assert any(_differs(recording) for recording in _reusing())


def _differs(recording: Committed) -> bool:
    try:
        return check_trace(recording.trace()).difference is not None
    except Exception:  # the recording cannot be replayed
        return True


def test_gpu_runner_rejects_partial_block_reuse() -> None:
    with pytest.raises(InputError, match="enable_block_reuse: the GPU runner does not copy parts"):
        TRTLLM.build_with_tables(TrtllmConfig())
    TRTLLM.build_with_tables(TrtllmConfig(enable_block_reuse=False))
