"""Error responses in the error format of the API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from simkv.core.errors import InputError, simplify_pydantic_message

#: Error types of the API by status code.
KINDS = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}


class RequestError(Exception):
    """Error response to an HTTP request.

    ``param`` is the name of the invalid field. ``kind`` is the error type; by default, it follows
    from the HTTP status.
    """

    def __init__(self, status: int, message: str, param: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.kind = status, message, param, kind


def error_object(
    status: int, message: str, param: str | None = None, kind: str = ""
) -> dict[str, Any]:
    """Build the body of an error response."""
    kind = kind or KINDS.get(status) or HTTPStatus(status).phrase.replace(" ", "") + "Error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(
    status: int, message: str, param: str | None = None, kind: str = ""
) -> JSONResponse:
    """Build an error response."""
    return JSONResponse(error_object(status, message, param, kind), status)


def install_error_handlers(app: FastAPI) -> None:
    """Make an application return all errors in the error format of the API."""

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
        return error_response(error.status, error.message, error.param, error.kind)

    @app.exception_handler(InputError)
    async def broken(_: Request, error: InputError) -> JSONResponse:
        """Report that a custom scheduler violates an invariant."""
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
