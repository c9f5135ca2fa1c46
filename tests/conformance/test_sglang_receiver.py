"""Tests that simkv receives requests in the same loop iterations as SGLang
(``record_sglang_receiver``).
"""

import json
from pathlib import Path

import pytest

from simkv.core.scheduler_protocol import BatchKind
from simkv.schedulers.sglang.request_intake import Receiver

RECORDED = json.loads((Path(__file__).parent / "receiver.json").read_text(encoding="utf-8"))
KINDS: dict[str, BatchKind | None] = {"D": "decode", "E": "prefill", "M": "mixed", "N": None}


@pytest.mark.parametrize(("interval", "modes", "received"), RECORDED)
def test_requests_are_received_in_the_recorded_iterations(
    interval: int, modes: str, received: str
) -> None:
    receiver = Receiver(interval)
    turns = []
    for letter in modes:
        receiver.unread = [0]
        turns.append("1" if receiver.receive(KINDS[letter]) else "0")
    assert "".join(turns) == received
