# mypyc: compile
"""Admission control of a replica's server."""

from __future__ import annotations

from collections.abc import Iterable

from simkv.core.engine_spec import AdmissionCheck, EngineConfig
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Refusal
from simkv.schedulers.engine_registry import find_engine_spec


class QueueLimit:
    """Applies ``admission`` to each arriving request and counts the admitted ones."""

    def __init__(self, admission: AdmissionCheck) -> None:
        self._admission = admission
        self._admitted: set[int] = set()
        self._prompts: dict[int, int] = {}  # of requests without a first token
        self._in_prefill = 0

    def find_rejection(self) -> Refusal | None:
        """Return why a request that arrives now would be rejected, or None."""
        return self._admission(len(self._admitted), self._in_prefill)

    def admit(self, request: Request) -> Refusal | None:
        """Admit a request; return a refusal if it is rejected."""
        if refusal := self.find_rejection():
            return refusal
        self._admitted.add(request.id)
        self._prompts[request.id] = request.prompt_tokens
        self._in_prefill += request.prompt_tokens
        return None

    def record_tokens(self, ids: Iterable[int]) -> None:
        """Record that these requests received a token."""
        for i in ids:
            self._in_prefill -= self._prompts.pop(i, 0)

    def remove(self, i: int) -> None:
        """Remove a request that has ended or was rejected."""
        self._admitted.discard(i)
        self._in_prefill -= self._prompts.pop(i, 0)


def build_queue_limit(config: EngineConfig) -> QueueLimit | None:
    """Return the admission control of a server, or None if it admits all requests."""
    admission = find_engine_spec(config).admission(config)
    return QueueLimit(admission) if admission else None
