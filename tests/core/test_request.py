"""Tests of requests, and of the fields that a scheduler sees."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from simkv.core.request import Prompt, Request


def test_prompt_hides_output_tokens() -> None:
    hidden = {field.name for field in fields(Request)} - {field.name for field in fields(Prompt)}
    assert hidden == {"output_tokens", "timeout", "acceptance"}


def test_requests_are_immutable() -> None:
    request = Request(0, 1, 1)
    with pytest.raises(FrozenInstanceError):
        request.prompt_tokens = 2  # type: ignore[misc]
