"""The OpenAPI document: what each path answers, errors and streams included."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field


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


#: What any path may answer: without the key, with a body that does not come or is too large.
ANYWHERE = errors(401, 408, 413)
GENERATION = content("application/json", "text/event-stream") | errors(400, 404, 503)
#: What FastAPI would say for itself, and `refusals` says as 400.
UNUSED = ("HTTPValidationError", "ValidationError")


def tell_the_truth(app: FastAPI) -> None:
    """Let the document of an application be without what it never answers."""
    usual = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = usual()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in UNUSED:
                schema["components"]["schemas"].pop(name, None)
        return usual()

    app.openapi = openapi
