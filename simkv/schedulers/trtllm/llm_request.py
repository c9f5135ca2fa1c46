"""What TensorRT-LLM knows of a request (``LlmRequest``), as far as it decides anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simkv.core.request import Prompt

#: Its prompt is computed; it decodes; its last token by ``max_new`` is under way.
RequestStage = Literal["context", "generation", "to complete"]


@dataclass(slots=True, eq=False)
class LlmRequest:
    """A request in the engine; all lengths in tokens.

    ``prompt`` tokens are to be computed, after a pause also those that were emitted before it, and
    ``new`` may be emitted from then on; ``known`` are prompt and outputs together. Of the prompt
    ``position`` are computed and ``chunk`` are to be computed in this step; the first ``reused`` of
    them others computed. The KV cache counts ``cached`` tokens for it, which leads what is computed
    by the step under way.
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
        """A request as it comes, its ``max_tokens`` cut so that it stays within ``longest``."""
        tokens = prompt.prompt_tokens
        return cls(prompt.id, tokens, min(prompt.max_tokens, longest - tokens), tokens)

    @property
    def remaining(self) -> int:
        """Of its prompt, what is not computed."""
        return self.prompt - self.position

    @property
    def generated(self) -> int:
        """Tokens emitted since its prompt was last made of all it had."""
        return self.known - self.prompt

    @property
    def first_chunk(self) -> bool:
        """Whether nothing of its prompt is computed but what was there."""
        return self.state == "context" and self.position == self.reused

    @property
    def last_chunk(self) -> bool:
        """Whether this step computes the rest of its prompt."""
        return self.chunk == self.remaining

    @property
    def started(self) -> bool:
        """Whether a pause would take anything from it."""
        return not self.first_chunk

    def begin(self, reused: int, tokens_per_block: int) -> None:
        """So much of its prompt is there: its first chunk is of the rest, and still ends with a
        block unless it ends the prompt (``setPrepopulatedPromptLen``)."""
        end = reused + self.chunk
        if end < self.prompt:
            end = end // tokens_per_block * tokens_per_block
        self.position = self.reused = reused
        self.chunk = min(end, self.prompt) - reused

    def pause(self) -> None:
        """What it has emitted is prompt from now on, and all of that is to be computed."""
        self.new -= self.generated
        self.prompt = self.known
        self.state = "context"
        self.position = self.chunk = self.cached = self.reused = 0

    def advance(self, *, overlap: bool) -> None:
        """Its part of a step was launched: what it will be in the next decision.

        With ``overlap`` that is made before the token of this step is known.
        """
        if self.state == "context":
            self.position, self.chunk = self.position + self.chunk, 0
            if self.remaining:
                return
            self.state = "generation"
        if overlap and self.generated + 1 >= self.new:
            self.state = "to complete"
