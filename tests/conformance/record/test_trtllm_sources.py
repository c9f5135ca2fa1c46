"""TensorRT-LLM's own Python scheduler, run with stubs of the rest of the engine.

Tests of the scheduler need its sources as ``trtllm-5f480b7a6`` in the directory ``SIMKV_WHEELS``
(default: ``wheels`` beside the checkout). Without them, these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from simkv.conformance.record.rule_inference import find_mismatch
from simkv.conformance.record.trtllm_cases import case_names, make_case
from simkv.conformance.record.trtllm_recorder import record
from simkv.core.errors import InputError
from simkv.native.trtllm.trtllm_stubs import SCHEDULER, KvCacheStub, LlmRequestStub
from simkv.native.trtllm.trtllm_stubs import LlmRequestState as State
from simkv.native.trtllm.trtllm_stubs import stub_trtllm_imports as stub_imports
from tests.conformance.record.test_release_sources import WHEELS

VERSION = "5f480b7a6"
FILE = Path(*SCHEDULER.split(".")).with_suffix(".py")
#: Planted changes: original text and replacement.
PLANTED = {
    "order": (
        "for i in range(req_it_end - 1, req_it - 1, -1)",
        "for i in range(req_it, req_it_end)",
    ),
    "reserve": ("<= avail\n", "< avail\n"),
    "budget": ("+ req_num_tokens > max_num_tokens", "+ req_num_tokens >= max_num_tokens"),
    "chunk": ("(int(actual_size) // unit_size) * unit_size", "int(actual_size)"),
    "static": ("if not self.static_batch or len(scheduled_requests) == 0", "if True"),
}


@pytest.fixture
def source() -> Path:
    folder = WHEELS / f"trtllm-{VERSION}"
    if not folder.is_dir():
        pytest.skip(f"no sources of this revision: {folder.name} is missing in {WHEELS.name}/")
    return folder


def differing_cases(folder: Path, names: list[str]) -> Iterator[str]:
    """Yield the names of cases in which simkv and the sources in ``folder`` make different
    decisions.
    """
    with stub_imports(folder):
        for name in names:
            if find_mismatch(record(make_case(VERSION, name), VERSION, name), None):
                yield name


def test_simulation_reproduces_its_decisions(source: Path) -> None:
    assert [*differing_cases(source, case_names(VERSION, 60))] == []


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_change_is_detected(what: str, source: Path, tmp_path: Path) -> None:
    text, (old, new) = (source / FILE).read_text(encoding="utf-8"), PLANTED[what]
    assert old in text
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text(text.replace(old, new), encoding="utf-8")
    assert next(differing_cases(tmp_path, case_names(VERSION, 300)), None)


def test_rejects_a_directory_without_the_scheduler(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"scheduler\.py: missing; expected"),
        stub_imports(tmp_path),
    ):
        pass


def test_the_stub_counts_blocks() -> None:
    cache, r = KvCacheStub(6, 4, window=24), LlmRequestStub(0, 9, 10, left=10)
    assert cache.get_needed_blocks_one_step(r, False, 24) == 3
    assert cache.get_remaining_blocks_to_completion(r, 24) == 5
    cache.add_sequence(r)
    assert (cache.free, cache.get_remaining_blocks_to_completion(r, 24)) == (3, 2)
    r.state, r.context_current_position = State.GENERATION_IN_PROGRESS, 9
    for _ in range(3):
        assert cache.get_needed_blocks_one_step(r, False, 24) == 0
        cache.add_token(r)
    assert cache.get_needed_blocks_one_step(r, False, 24) == 1
    cache.start_scheduling()
    cache.scheduling_remove_sequence(0)
    assert cache.scheduling_has_free_blocks(6, 24)
    assert cache.free == 3


def test_a_pause_resets_even_a_finished_request() -> None:
    r = LlmRequestStub(0, 3, 1, left=1)
    r.add_token()
    assert r.is_finished
    r.pause()
    assert not r.is_finished
    assert (r.prompt_len, r.max_new_tokens, r.context_remaining_length) == (4, 0, 4)
