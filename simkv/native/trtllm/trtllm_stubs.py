"""Stubs for the C++ objects that TensorRT-LLM's Python scheduler uses: requests and KV blocks.

They follow ``llmRequest.h`` and ``kvCacheManager.cpp`` method by method, for one attention window,
a beam width of one and no draft tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simkv.core.errors import InputError
from simkv.native.import_stubs import SourceFinder, stub_imports

ROOT = "tensorrt_llm"
SCHEDULER = f"{ROOT}._torch.pyexecutor.scheduler.scheduler"


class LlmRequestState(enum.Enum):
    """States of a request on one rank without disaggregation (``llmRequest.h``)."""

    ENCODER_INIT = 1
    DISAGG_GENERATION_INIT = 8
    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20


class CapacitySchedulerPolicy(enum.Enum):
    """Capacity policies, named as in ``llm_args.py``."""

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


#: A token: the name of its stream and the position in this stream.
StreamToken = tuple[str, int]


class LlmRequestStub:
    """A request with the fields that the scheduler reads; the model still emits ``left`` tokens."""

    num_draft_tokens = 0
    has_draft_tokens = False
    is_disagg_generation_init_state = False
    is_encoder_init_state = False
    lora_task_id = None

    def __init__(
        self,
        request_id: int,
        prompt_len: int,
        max_new_tokens: int,
        left: int,
        prompt: Sequence[StreamToken] = (),
    ) -> None:
        self.request_id = self.py_request_id = request_id
        self.prompt_len = self.orig_prompt_len = self.num_tokens = prompt_len
        self.max_new_tokens = self.py_max_new_tokens = max_new_tokens
        self.left = left
        own = ((f"u{request_id}", at) for at in range(prompt_len))
        self.unique_tokens = list(prompt or own)
        self.prepopulated_prompt_len = 0
        self.state = LlmRequestState.CONTEXT_INIT
        self.context_current_position = 0
        self._chunk = prompt_len

    @property
    def state_value(self) -> int:
        return self.state.value

    @property
    def is_context_init_state(self) -> bool:
        return self.state is LlmRequestState.CONTEXT_INIT

    @property
    def is_generation_in_progress_state(self) -> bool:
        return self.state in (
            LlmRequestState.GENERATION_IN_PROGRESS,
            LlmRequestState.GENERATION_TO_COMPLETE,
        )

    @property
    def is_finished(self) -> bool:
        return self.state is LlmRequestState.GENERATION_COMPLETE

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    @property
    def context_chunk_size(self) -> int:
        return self._chunk

    @context_chunk_size.setter
    def context_chunk_size(self, size: int) -> None:
        assert self.is_context_init_state
        assert size >= 0
        self._chunk = min(size, self.context_remaining_length)

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_current_position + self._chunk == self.prompt_len

    def get_unique_tokens(self, _beam: int) -> list[StreamToken]:
        return self.unique_tokens

    def get_num_tokens(self, _beam: int) -> int:
        return self.num_tokens

    def get_beam_width_by_iter(self, for_next_iteration: bool) -> int:  # noqa: ARG002
        return 1

    def move_to_next_context_chunk(self) -> None:
        """Advance the position to the end of the launched chunk of the prompt."""
        self.context_current_position += self._chunk
        self._chunk = 0

    def set_prepopulated_prompt_len(self, tokens: int, tokens_per_block: int) -> None:
        """Set the number of cached tokens; the first chunk ends at the end of a block or prompt."""
        assert tokens < self.prompt_len
        self.prepopulated_prompt_len = tokens
        if tokens > 0:
            chunk = self.context_chunk_size
            if tokens + chunk < self.prompt_len:
                end = (tokens + chunk) // tokens_per_block * tokens_per_block
                chunk = end - tokens
                assert chunk <= self.context_chunk_size
            self.context_current_position = tokens
            self.context_chunk_size = chunk
            assert self.is_last_context_chunk or (tokens + chunk) % tokens_per_block == 0

    def will_complete_next_iteration(self) -> bool:
        return self.num_tokens - self.prompt_len + 1 >= self.max_new_tokens

    def add_token(self) -> None:
        """Add a sampled token, and end the request if a stop criterion applies."""
        self.unique_tokens.append((f"o{self.request_id}", self.num_tokens - self.orig_prompt_len))
        self.num_tokens += 1
        self.left = max(self.left - 1, 0)
        longest = self.num_tokens - self.orig_prompt_len >= self.py_max_new_tokens
        if not self.left or longest:
            self.state = LlmRequestState.GENERATION_COMPLETE

    def pause(self) -> None:
        """Return the request to its start; emitted tokens become part of the prompt."""
        self.max_new_tokens -= self.num_tokens - self.prompt_len
        self.prompt_len = self.num_tokens
        self.state = LlmRequestState.CONTEXT_INIT
        self.context_current_position = self.prepopulated_prompt_len = 0
        self._chunk = self.prompt_len


class KvCacheStub:
    """Stub of the cache manager that counts blocks; ``window`` is the longest sequence."""

    is_variable_window = False
    enable_block_reuse = False

    def __init__(self, blocks: int, tokens_per_block: int, window: int) -> None:
        self.free = blocks
        self.size = tokens_per_block
        self.window = window
        self.max_attention_window_vec = [window]
        self.held: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self._scheduling_free = 0

    def get_kv_cache_stats(self) -> SimpleNamespace:
        return SimpleNamespace(num_free_blocks_per_window_size={self.window: self.free})

    def start_scheduling(self) -> None:
        self._scheduling_free = self.free

    def scheduling_has_free_blocks(self, blocks: int, _window: int) -> bool:
        return self._scheduling_free >= blocks

    def scheduling_remove_sequence(self, request_id: int) -> None:
        self._scheduling_free += self.held[request_id]

    def get_needed_blocks_one_step(self, r: LlmRequestStub, two_steps: bool, window: int) -> int:
        if r.is_context_init_state and r.is_first_context_chunk:
            shared, rest = divmod(min(r.prompt_len, window + r.max_new_tokens), self.size)
            return shared + self._blocks(rest)
        if not r.is_generation_in_progress_state:
            return 0
        now = self.tokens[r.request_id]
        most = r.max_new_tokens - (now - r.prompt_len)
        later = now + min(2 if two_steps else 1, most)
        return 0 if later > window else self._blocks(later) - self._blocks(now)

    def get_remaining_blocks_to_completion(self, r: LlmRequestStub, window: int) -> int:
        context = min(r.prompt_len, window) // self.size
        total = self._blocks(min(r.prompt_len + r.max_new_tokens, window))
        held = self.held.get(r.request_id, 0)
        if held < context:
            return context - held + total - context
        return total - held

    def add_sequence(self, r: LlmRequestStub) -> None:
        self.tokens[r.request_id] = r.prompt_len
        self.held[r.request_id] = 0
        self._take(r.request_id, self._blocks(r.prompt_len))

    def add_token(self, r: LlmRequestStub) -> None:
        self.tokens[r.request_id] += 1
        if (self.tokens[r.request_id] - 1) % self.size == 0:
            self._take(r.request_id, 1)

    def store_context_blocks(self, r: LlmRequestStub) -> None:
        """Do nothing, because block reuse is off; ``ReusingKvCacheStub`` overrides this method."""

    def remove_sequence(self, r: LlmRequestStub) -> None:
        self.free += self.held.pop(r.request_id, 0)
        self.tokens.pop(r.request_id, None)

    def _take(self, request_id: int, blocks: int) -> None:
        assert self.free >= blocks, "No free blocks left"
        self.free -= blocks
        self.held[request_id] += blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.size)


#: Attributes of stub modules that the scheduler reads.
STUB_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {
    f"{ROOT}.llmapi.llm_args": {"CapacitySchedulerPolicy": CapacitySchedulerPolicy},
    f"{ROOT}.logger": {"logger": SimpleNamespace(debug=lambda *_: None)},
    f"{ROOT}._torch.pyexecutor.llm_request": {
        "LlmRequest": LlmRequestStub,
        "LlmRequestState": LlmRequestState,
    },
}


def stub_trtllm_imports(source: Path) -> AbstractContextManager[None]:
    """Return an import context for the scheduler in ``source``; raises InputError without one."""
    file = source.joinpath(*SCHEDULER.split(".")).with_suffix(".py")
    if not file.is_file():
        raise InputError(
            f"{file}: missing; expected the sources of TensorRT-LLM's Python scheduler"
        )
    return stub_imports(SourceFinder(source, (ROOT,), (SCHEDULER,), (), STUB_ATTRIBUTES))
