"""Read the fields of a ``config.json``. Invalid values raise InputError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simkv.core.errors import InputError


class ConfigFields:
    """The fields of a ``config.json`` that describe the layers of a decoder.

    ``where`` is the name of the file in error messages.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def field_error(self, field: str, why: str) -> InputError:
        """Return an InputError with the file, the field and the reason ``why``."""
        return InputError(f"{self.where}: {field}: {why}")

    def number(self, *fields: str, default: int | None = None, least: int = 1) -> int:
        """Return the integer value of the first field in ``fields`` that is present, or
        ``default``.

        Raises InputError if no field is present and there is no default, or if the value is not an
        integer of at least ``least``.
        """
        for field in fields:
            value = self.config.get(field)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self.field_error(
                    field, f"must be an integer of at least {least}, got {value!r}"
                )
            return value
        if default is None:
            raise self.field_error(fields[0], "missing; expected an integer")
        return default
