"""FastAPI application: the endpoints of the real server, and the explanation endpoints of simkv."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from msgspec.json import encode, schema_components
from pydantic import BaseModel, Field

from simkv.core.version import __version__
from simkv.serve.error_responses import RequestError, install_error_handlers
from simkv.serve.event_stream import (
    CHAT,
    COMPLETION,
    ReplyResponse,
    Writer,
)
from simkv.serve.live_explainer import Explainer, LiveExplanation, explain_no_requests
from simkv.serve.request_bodies import (
    CHAT_BODY,
    COMPLETION_BODY,
    DETOKENIZE_BODY,
    TOKENIZE_BODY,
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    read_body,
)
from simkv.serve.request_handler import RequestHandler, id_of


class ErrorDetail(BaseModel):
    """Details of an error: ``param`` is the invalid field, ``code`` the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """Body of an error response."""

    error: ErrorDetail = Field()


Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """Return the OpenAPI responses for the given statuses, in the error format of the API."""
    return {status: {"model": ErrorBody} for status in statuses}


def content(*kinds: str) -> Responses:
    """Return the OpenAPI entry of a response with the given media types."""
    return {200: {"description": "successful response", "content": {kind: {} for kind in kinds}}}


_REFERENCE = "#/components/schemas/{name}"
_, BODIES = schema_components(
    [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody], ref_template=_REFERENCE
)


def body_of(name: str) -> dict[str, Any]:
    """Return the OpenAPI entry for a request body with the schema ``name``."""
    schema = {"schema": {"$ref": _REFERENCE.format(name=name)}}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}


#: Errors that every path can return: missing key (401), late body (408), too large body (413).
COMMON_RESPONSES = errors(401, 408, 413)
GENERATION = content("application/json", "text/event-stream") | errors(400, 404, 503)
#: Schemas that FastAPI adds for its own errors, which ``error_responses`` returns as status 400.
UNUSED = ("HTTPValidationError", "ValidationError")


def remove_unused_schemas(app: FastAPI) -> None:
    """Remove responses and schemas that no endpoint uses from the OpenAPI document."""
    usual = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = usual()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            schemas = schema["components"]["schemas"]
            schemas.update(BODIES)
            for name in UNUSED:
                schemas.pop(name, None)
        return usual()

    app.openapi = openapi


#: Function that returns the text of a scenario file.
Describe = Callable[[], Awaitable[str]]
#: Response without a body, for an engine that is dead.
DEAD: dict[int | str, dict[str, Any]] = {503: {"description": "the engine is dead"}}


def application(
    handler: RequestHandler, explainer: Explainer, describe: Describe, metrics: Callable[[], bytes]
) -> FastAPI:
    """Build the application for a request handler.

    ``describe`` returns the text of a scenario file. ``metrics`` returns the metrics in the
    Prometheus text format.
    """
    app = FastAPI(
        title="simkv",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=COMMON_RESPONSES,
    )
    install_error_handlers(app)
    remove_unused_schemas(app)
    _add_generation(app, handler)
    _add_state(app, handler, metrics)
    _add_explanations(app, handler, explainer, describe)
    return app


def _add_generation(app: FastAPI, handler: RequestHandler) -> None:
    texts = handler.served.texts

    @app.post("/v1/completions", responses=GENERATION, openapi_extra=body_of("CompletionBody"))
    async def completions(request: Request) -> Response:
        """Complete a prompt."""
        body = await read_body(request, COMPLETION_BODY)
        body.check_stop()
        prompts = [
            texts.encode(prompt) if isinstance(prompt, str) else array("q", prompt)
            for prompt in body.prompts()
        ]
        name = id_of(request.headers.get("x-request-id"))
        call = await handler.begin(COMPLETION.prefix, name, body, prompts)
        return ReplyResponse(Writer(handler, call, body, COMPLETION))

    @app.post("/v1/chat/completions", responses=GENERATION, openapi_extra=body_of("ChatBody"))
    async def chat(request: Request) -> Response:
        """Complete a conversation."""
        body = await read_body(request, CHAT_BODY)
        body.check_stop()
        prompt = texts.chat(_turns(body.messages))
        name = id_of(request.headers.get("x-request-id"))
        call = await handler.begin(CHAT.prefix, name, body, [prompt])
        return ReplyResponse(Writer(handler, call, body, CHAT))

    tokenized = content("application/json") | errors(400, 503)

    @app.post("/tokenize", responses=tokenized, openapi_extra=body_of("TokenizeBody"))
    async def tokenize(request: Request) -> Response:
        """Tokenize a text or a conversation."""
        body = await read_body(request, TOKENIZE_BODY)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError(400, "expected either prompt or messages", "prompt")
        tokens = texts.chat(_turns(body.messages or [])) if body.messages else None
        tokens = texts.encode(body.prompt or "") if tokens is None else tokens
        longest = handler.served.longest
        said = {"count": len(tokens), "max_model_len": longest, "tokens": tokens.tolist()}
        return Response(encode(said), media_type="application/json")

    @app.post("/detokenize", responses=errors(400, 503), openapi_extra=body_of("DetokenizeBody"))
    async def detokenize(request: Request) -> dict[str, str]:
        """Convert tokens to text."""
        body = await read_body(request, DETOKENIZE_BODY)
        return {"prompt": texts.decode(body.tokens)}


def _turns(messages: list[ChatMessage]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


def _add_state(app: FastAPI, handler: RequestHandler, metrics: Callable[[], bytes]) -> None:
    front, live = handler.served, handler.live

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model and its LoRA adapters."""
        common = {"object": "model", "created": live.started_at, "owned_by": front.engine}
        base = {"id": front.model, "root": front.model, "parent": None}
        cards = [{**common, **base, "max_model_len": front.longest}]
        for name in front.loras:
            adapter = {"id": name, "root": name, "parent": front.model, "max_model_len": None}
            cards.append({**common, **adapter})
        return {"object": "list", "data": cards}

    @app.get("/health", responses=content() | DEAD, response_class=Response)
    @app.get("/ping", responses=content() | DEAD, response_class=Response)
    async def health() -> Response:
        """Report whether the engine is alive."""
        return Response(status_code=503 if live.dead else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the simulated version and name of the engine, and the version of simkv."""
        return {"version": front.variant, "engine": front.engine, "simkv": __version__}

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of calls in flight."""
        return {"server_load": handler.in_flight}

    @app.get("/metrics", responses=content("text/plain"), response_class=Response)
    async def figures() -> Response:
        """Return metrics in the Prometheus text format."""
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_explanations(
    app: FastAPI, handler: RequestHandler, explainer: Explainer, describe: Describe
) -> None:
    live = handler.live

    @app.get("/scenario", responses=content("application/yaml"), response_class=Response)
    async def scenario() -> Response:
        """Return a scenario file with the configuration and the requests received so far."""
        return PlainTextResponse(await describe(), media_type="application/yaml")

    said = content("text/plain", "application/json")

    @app.get("/explain", responses=said, response_class=Response)
    async def explain(format: str = "text") -> Response:
        """Explain the run so far."""
        if not live.received:
            return _said(explain_no_requests(live.now, live.dead), format)
        return _said(await explainer.explain([]), format)

    @app.get("/explain/{name:path}", responses=said | errors(404), response_class=Response)
    async def explain_one(name: str, format: str = "text") -> Response:
        """Explain the waiting time of a call, by the id of its reply or by its request number."""
        if not name:
            return await explain(format)
        found = handler.find(name)
        if not found:
            raise RequestError(404, f"unknown request {name!r}")
        return _said(await explainer.explain(found), format)


def _said(explained: LiveExplanation, format: str) -> Response:
    if format == "json":
        return JSONResponse(explained.data)
    return PlainTextResponse(explained.text + "\n")
