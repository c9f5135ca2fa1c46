"""The door of a replica: what its server counts before it lets a request in."""

from __future__ import annotations

from collections.abc import Iterable

from simkv.core.engine_spec import AdmissionCheck, EngineConfig
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Refusal
from simkv.schedulers.engine_registry import find_engine_spec


class QueueLimit:
    """Asks ``admission`` about each request that comes, and counts those that it lets in."""

    def __init__(self, admission: AdmissionCheck) -> None:
        self._admission = admission
        self._inside: set[int] = set()
        self._prompts: dict[int, int] = {}  # tokens of those without a first token
        self._in_prefill = 0

    def find_rejection(self) -> Refusal | None:
        """Why one that came now would be turned away, if it would."""
        return self._admission(len(self._inside), self._in_prefill)

    def enter(self, request: Request) -> Refusal | None:
        """A request comes; returns why it is turned away, if it is."""
        if refusal := self.find_rejection():
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


def build_queue_limit(config: EngineConfig) -> QueueLimit | None:
    """The door of a replica with these knobs; None if all may come in."""
    admission = find_engine_spec(config).admission(config)
    return QueueLimit(admission) if admission else None
