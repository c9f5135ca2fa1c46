"""The door of a replica: what its server counts before it lets a request in."""

from __future__ import annotations

from collections.abc import Iterable

from simkv.core.engine import EngineConfig, TurnAway
from simkv.core.request import Request
from simkv.core.scheduler import Refusal
from simkv.schedulers.registry import spec_of


class Door:
    """Asks ``admission`` about each request that comes, and counts those that it lets in."""

    def __init__(self, admission: TurnAway) -> None:
        self._admission = admission
        self._inside: set[int] = set()
        self._prompts: dict[int, int] = {}  # tokens of those without a first token
        self._in_prefill = 0

    def shut(self) -> Refusal | None:
        """Why one that came now would be turned away, if it would."""
        return self._admission(len(self._inside), self._in_prefill)

    def enter(self, request: Request) -> Refusal | None:
        """A request comes; returns why it is turned away, if it is."""
        if refusal := self.shut():
            return refusal
        self._inside.add(request.id)
        self._prompts[request.id] = request.prompt_tokens
        self._in_prefill += request.prompt_tokens
        return None

    def told(self, ids: Iterable[int]) -> None:
        """These are given a token."""
        for i in ids:
            self._in_prefill -= self._prompts.pop(i, 0)

    def left(self, i: int) -> None:
        """A request has ended, or was turned away."""
        self._inside.discard(i)
        self._in_prefill -= self._prompts.pop(i, 0)


def door_of(config: EngineConfig) -> Door | None:
    """The door of a replica with these knobs; None if all may come in."""
    admission = spec_of(config).admission(config)
    return Door(admission) if admission else None
