"""What a client sends, and what a scheduler is told of it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from simkv.core.request import Prompt, Request


def test_a_prompt_does_not_know_what_will_be_emitted() -> None:
    hidden = {field.name for field in fields(Request)} - {field.name for field in fields(Prompt)}
    assert hidden == {"output_tokens", "timeout", "acceptance"}


def test_requests_do_not_change() -> None:
    request = Request(0, 1, 1)
    with pytest.raises(FrozenInstanceError):
        request.prompt_tokens = 2  # type: ignore[misc]
