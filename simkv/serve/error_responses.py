"""Requests that are refused, in the API's own error object."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from simkv.core.errors import InputError, simplify_pydantic_message

#: What the API calls the kinds of errors.
KINDS = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}


class RequestError(Exception):
    """A request is refused with this status; ``param`` is the field that is wrong.

    ``kind`` is what the API calls it, where it is not what it calls others of the status.
    """

    def __init__(self, status: int, message: str, param: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.kind = status, message, param, kind


def error_object(
    status: int, message: str, param: str | None = None, kind: str = ""
) -> dict[str, Any]:
    """The body of a response that is an error."""
    kind = kind or KINDS.get(status) or HTTPStatus(status).phrase.replace(" ", "") + "Error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(
    status: int, message: str, param: str | None = None, kind: str = ""
) -> JSONResponse:
    """A response that is an error."""
    return JSONResponse(error_object(status, message, param, kind), status)


def install_error_handlers(app: FastAPI) -> None:
    """Let all errors of an application have the API's own form."""

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
        return error_response(error.status, error.message, error.param, error.kind)

    @app.exception_handler(InputError)
    async def broken(_: Request, error: InputError) -> JSONResponse:
        """A scheduler of one's own has broken a law."""
        return error_response(503, str(error))

    @app.exception_handler(HTTPException)
    async def no_such_thing(_: Request, error: HTTPException) -> JSONResponse:
        response = error_response(error.status_code, str(error.detail))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        said = simplify_pydantic_message(str(first["msg"]))
        return error_response(400, f"{field}: {said}" if field else said, field or None)
