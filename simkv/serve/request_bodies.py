r"""Bodies of HTTP requests: the fields that affect the simulation. Other fields are ignored.

msgspec checks values while it parses the body and stops at the first invalid element. An invalid
body therefore needs little more memory than its size.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from msgspec import Meta, MsgspecError, Raw, Struct, ValidationError
from msgspec.json import Decoder
from starlette.requests import ClientDisconnect, Request

from simkv.serve.error_responses import RequestError

T = TypeVar("T")
LARGEST = 2**63 - 1
Int64 = Annotated[int, Meta(ge=-(2**63), le=LARGEST)]
#: Id of a token.
TokenId = Annotated[int, Meta(ge=0, le=LARGEST)]
Tokens = Annotated[list[TokenId], Meta(min_length=1)]
MOST_PROMPTS = 1024
MOST_STOPS = 1024

_LIST = {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS}
_TOKENS = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": LARGEST},
}
_TEXT = {"type": "string"}
_PROMPT_SCHEMA = {"anyOf": [_TEXT, _TOKENS, {**_LIST, "items": _TEXT}, {**_LIST, "items": _TOKENS}]}
_STOP_SCHEMA = {
    "anyOf": [_TEXT, {"type": "array", "maxItems": MOST_STOPS, "items": _TEXT}, {"type": "null"}]
}


class SimkvExtension(Struct, frozen=True):
    """Value of the field ``simkv`` of a body: fields that the APIs of the engines do not have."""

    output_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=2**31,
                description="Number of tokens that the model emits, unless max_tokens is smaller.",
            ),
        ]
        | None
    ) = None


class StreamOptions(Struct, frozen=True):
    """Options for additional content of a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Body(Struct, frozen=True, kw_only=True):
    """Fields that the bodies of both generation APIs have."""

    model: str | None = None
    max_tokens: Int64 | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    ignore_eos: bool = False
    n: Annotated[int, Meta(ge=1, le=2**31)] | None = 1
    priority: Int64 = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Int64 | None = None
    # msgspec has no optional Raw type.
    stop: Annotated[Raw, Meta(extra_json_schema=_STOP_SCHEMA)] = None  # type: ignore[assignment]
    request_id: str | None = None
    simkv: SimkvExtension = SimkvExtension()

    @property
    def limit(self) -> int | None:
        """Maximum number of output tokens that the client requests, or None."""
        return self.max_tokens

    @property
    def limit_param(self) -> str:
        """Name of the field that sets ``limit``."""
        return "max_tokens"

    def check_stop(self) -> None:
        """Raise RequestError if ``stop`` is invalid. A valid ``stop`` has no effect."""
        if self.stop is not None:
            _decode_list(self.stop, "stop", MOST_STOPS, {'"': _STRINGS}, _TEXT_OR_NONE)


class CompletionBody(Body, frozen=True, kw_only=True):
    """Body of ``/v1/completions``: one prompt or several, as text or as token ids."""

    prompt: Annotated[Raw, Meta(extra_json_schema=_PROMPT_SCHEMA)]
    max_tokens: Int64 | None = 16
    echo: bool | None = False

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str] | list[list[int]]:
        """Decode the prompts. Raises RequestError if there are too many or if one is invalid."""
        lists: dict[str, Decoder[Any]] = {'"': _STRINGS, "[": _TOKEN_LISTS}
        found = _decode_list(self.prompt, "prompt", MOST_PROMPTS, lists, _TEXT_OR_TOKENS)
        several = isinstance(found, list) and not isinstance(found[0], int)
        return found if several else [found]


class ContentPart(Struct, frozen=True, gc=False):
    """Part of a message; parts without text have no effect."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True, gc=False):
    """Message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None

    @property
    def text(self) -> str:
        """Text of the message, joined from its parts."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text or "" for part in self.content)


class ChatBody(Body, frozen=True, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Int64 | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class TokenizeBody(Struct, frozen=True):
    """Body of ``/tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


COMPLETION_BODY = Decoder(CompletionBody, strict=False)
CHAT_BODY = Decoder(ChatBody, strict=False)
TOKENIZE_BODY = Decoder(TokenizeBody, strict=False)
DETOKENIZE_BODY = Decoder(DetokenizeBody, strict=False)

_STRINGS = Decoder(list[str])
_TOKEN_LISTS = Decoder(list[Tokens], strict=False)
_TEXT_OR_TOKENS = Decoder(str | Tokens, strict=False)
_TEXT_OR_NONE = Decoder(str | Annotated[list[str], Meta(max_length=0)] | None)
#: First character of the first element of a list.
_ELEMENT = re.compile(rb"\[[ \t\r\n]*(.)")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
#: Message and path in an error of msgspec.
_INVALID = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


async def read_body(request: Request, decoder: Decoder[T]) -> T:
    """Receive and decode the body of a request. Raises RequestError if it is invalid."""
    try:
        data = await request.body()
    except ClientDisconnect:
        raise RequestError(400, "the client disconnected before its body was complete") from None
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise RequestError(400, "Unsupported Media Type: Only 'application/json' is allowed")
    return decode(decoder, data)


def decode(decoder: Decoder[T], data: bytes, name: str = "") -> T:
    """Decode a body, or the value of its field ``name``.

    Raises RequestError at the first invalid value.
    """
    try:
        return decoder.decode(data)
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply", name or None) from None
    except ValidationError as error:
        raise _invalid(str(error), name) from None
    except (MsgspecError, ValueError) as error:
        hint = "; a lone surrogate is not a valid character" if _SURROGATE.search(data) else ""
        raise RequestError(
            400, f"the body is not valid JSON: {error}{hint}", name or None
        ) from None


def _invalid(message: str, name: str) -> RequestError:
    """Convert an error of msgspec to an error with the path in the API's notation."""
    found = _INVALID.fullmatch(message)
    assert found
    said, path = found[1], found[2] or ""
    if missing := _MISSING.fullmatch(said):
        said, path = "field required", f"{path}.{missing[1]}".lstrip(".")
    param = name + path if path.startswith("[") or not name else f"{name}.{path}".rstrip(".")
    said = said[0].lower() + said[1:].replace("`", "")
    return RequestError(400, f"{param}: {said}" if param else said, param or None)


def _decode_list(
    raw: Raw, name: str, most: int, lists: dict[str, Decoder[Any]], other: Decoder[Any]
) -> Any:
    """Decode a list of at most ``most`` elements. Raises RequestError if it has more.

    ``lists`` contains the decoders of lists by the first character of the first element. ``other``
    decodes all other values.
    """
    data = bytes(raw)
    first = _ELEMENT.match(data)
    kind = first[1].decode("latin-1") if first else ""
    if kind not in lists:
        return decode(other, data, name)
    if kind == '"':
        unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
        count = unescaped.count(b'"') // 2
    else:
        count = data.count(b"[") - 1
    if count > most:
        raise RequestError(400, f"{name}: expected at most {most} elements", name)
    return decode(lists[kind], data, name)
