"""The OpenAPI document: the responses of each path, including errors and streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from msgspec.json import schema_components
from pydantic import BaseModel, Field

from simkv.serve.request_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)


class ErrorDetail(BaseModel):
    """Details of an error: ``param`` is the invalid field, ``code`` the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """Body of an error response."""

    error: ErrorDetail = Field()


Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """Declare responses with these statuses in the error format of the API."""
    return {status: {"model": ErrorBody} for status in statuses}


def content(*kinds: str) -> Responses:
    """Declare a successful response with one of these media types; none means no body."""
    return {200: {"description": "successful response", "content": {kind: {} for kind in kinds}}}


_REFERENCE = "#/components/schemas/{name}"
_, BODIES = schema_components(
    [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody], ref_template=_REFERENCE
)


def body_of(name: str) -> dict[str, Any]:
    """Return the request body of an operation, by the name of its schema."""
    schema = {"schema": {"$ref": _REFERENCE.format(name=name)}}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}


#: Errors of any path: missing key (401), late body (408), too large body (413).
COMMON_RESPONSES = errors(401, 408, 413)
GENERATION = content("application/json", "text/event-stream") | errors(400, 404, 503)
#: Schemas that FastAPI adds; `error_responses` returns these errors as status 400.
UNUSED = ("HTTPValidationError", "ValidationError")


def remove_unused_schemas(app: FastAPI) -> None:
    """Remove responses and schemas that the application never uses from its OpenAPI document."""
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
