"""The bodies of requests, as far as they mean something here; all else is accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
#: A token's number.
TokenId = Annotated[int, Field(ge=0, le=2**63 - 1)]
MOST_PROMPTS = 1024


class Extra(BaseModel):
    """What only simkv understands."""

    output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = Field(
        None, description="How many tokens the model emits, unless max_tokens are fewer."
    )


class StreamOptions(BaseModel):
    """What a stream has besides tokens."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Body(BaseModel):
    """What requests for text have in common."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    max_tokens: Whole | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=2**31)] | None = 1
    priority: Whole = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    request_id: str | None = None
    simkv: Extra = Extra(output_tokens=None)

    @property
    def limit(self) -> int | None:
        """Most tokens that the client wants."""
        return self.max_tokens

    @property
    def limit_param(self) -> str:
        """The field that says so."""
        return "max_tokens"


class CompletionBody(Body):
    """Of ``/v1/completions``: one prompt or several, as text or as tokens."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=MOST_PROMPTS),
        ]
    )
    max_tokens: Whole | None = 16
    echo: bool | None = False

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str], self.prompt)

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens


class ChatMessage(BaseModel):
    """A turn of a conversation; of its parts those count that are text."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """All of it that is text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(str(part.get("text", "")) for part in self.content)


class ChatBody(Body):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Whole | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class TokenizeBody(BaseModel):
    """Of ``/tokenize``: a text or a conversation."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


class DetokenizeBody(BaseModel):
    """Of ``/detokenize``."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    tokens: list[TokenId]
