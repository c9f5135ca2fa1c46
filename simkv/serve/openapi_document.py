"""The OpenAPI document: what each path answers, errors and streams included."""

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
    """What was wrong: ``param`` is the field, ``code`` the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """What is answered in place of what was asked for."""

    error: ErrorDetail = Field()


Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """These errors, in the API's own form."""
    return {status: {"model": ErrorBody} for status in statuses}


def content(*kinds: str) -> Responses:
    """What comes is of one of these media types; of none where it has no body."""
    return {200: {"description": "as asked for", "content": {kind: {} for kind in kinds}}}


_REFERENCE = "#/components/schemas/{name}"
_, BODIES = schema_components(
    [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody], ref_template=_REFERENCE
)


def body_of(name: str) -> dict[str, Any]:
    """Request body of an operation, by the name of its schema."""
    schema = {"schema": {"$ref": _REFERENCE.format(name=name)}}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}


#: What any path may answer: without the key, with a body that does not come or is too large.
COMMON_RESPONSES = errors(401, 408, 413)
GENERATION = content("application/json", "text/event-stream") | errors(400, 404, 503)
#: What FastAPI would say for itself, and `refusals` says as 400.
UNUSED = ("HTTPValidationError", "ValidationError")


def remove_unused_schemas(app: FastAPI) -> None:
    """Let the document of an application be without what it never answers."""
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
