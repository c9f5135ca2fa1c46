"""State of a request in TensorRT-LLM (``LlmRequest``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simkv.core.request import Prompt

#: Stages of a request: computing its prompt; decoding; the last token that ``max_new`` allows is in
#: flight.
RequestStage = Literal["context", "generation", "to complete"]


@dataclass(slots=True, eq=False)
class LlmRequest:
    """A request in the engine. All fields are in tokens.

    - ``prompt``: tokens to prefill, including the tokens emitted before a pause.
    - ``new``: maximum number of tokens to emit after ``prompt``.
    - ``known``: prompt and output tokens.
    - ``position``: computed prompt tokens.
    - ``chunk``: prompt tokens to compute in this step.
    - ``reused``: prompt tokens taken from the prefix cache.
    - ``cached``: tokens in the KV cache, including the step in flight.
    """

    id: int
    prompt: int
    new: int
    known: int
    state: RequestStage = "context"
    position: int = 0
    chunk: int = 0
    cached: int = 0
    reused: int = 0

    @classmethod
    def of(cls, prompt: Prompt, longest: int) -> LlmRequest:
        """Build a new request with at most ``longest`` prompt and output tokens."""
        tokens = prompt.prompt_tokens
        return cls(prompt.id, tokens, min(prompt.max_tokens, longest - tokens), tokens)

    @property
    def remaining(self) -> int:
        """Number of prompt tokens that are not computed yet."""
        return self.prompt - self.position

    @property
    def generated(self) -> int:
        """Number of tokens emitted since the start or the last pause."""
        return self.known - self.prompt

    @property
    def first_chunk(self) -> bool:
        """Whether no chunk of the prompt is computed yet."""
        return self.state == "context" and self.position == self.reused

    @property
    def last_chunk(self) -> bool:
        """Whether the current step computes the rest of the prompt."""
        return self.chunk == self.remaining

    @property
    def started(self) -> bool:
        """Whether any part of the prompt is computed. If not, the request is never paused."""
        return not self.first_chunk

    def begin(self, reused: int, tokens_per_block: int) -> None:
        """Start the prompt after ``reused`` cached tokens and shorten the first chunk accordingly.

        The chunk ends at the end of a block or of the prompt. Source: ``setPrepopulatedPromptLen``.
        """
        end = reused + self.chunk
        if end < self.prompt:
            end = end // tokens_per_block * tokens_per_block
        self.position = self.reused = reused
        self.chunk = min(end, self.prompt) - reused

    def pause(self) -> None:
        """Discard the computed tokens. Prompt and output tokens are prefilled again later."""
        self.new -= self.generated
        self.prompt = self.known
        self.state = "context"
        self.position = self.chunk = self.cached = self.reused = 0

    def advance(self, *, overlap: bool) -> None:
        """Update the request after the launch of a step that contains it.

        With ``overlap``, the token of the step is not known yet.
        """
        if self.state == "context":
            self.position, self.chunk = self.position + self.chunk, 0
            if self.remaining:
                return
            self.state = "generation"
        if overlap and self.generated + 1 >= self.new:
            self.state = "to complete"
