"""Messages between simkv and the process that runs an engine's code: a length, followed by
marshalled plain data.
"""

from __future__ import annotations

import marshal
import socket
import struct
from typing import Any

from simkv.core.scheduler_protocol import (
    Batch,
    Completion,
    DraftedTokens,
    Held,
    KvCopies,
    KvCopy,
    PreemptionCause,
    Refusal,
)

_LENGTH = struct.Struct("!I")


def send(to: socket.socket, message: Any) -> None:
    """Send plain data (numbers, text, tuples, lists, dictionaries)."""
    data = marshal.dumps(message)
    to.sendall(_LENGTH.pack(len(data)) + data)


def receive(source: socket.socket) -> Any:
    """Return the next message. Raises EOFError if the connection is closed."""
    return marshal.loads(_read(source, _LENGTH.unpack(_read(source, _LENGTH.size))[0]))


def _read(source: socket.socket, size: int) -> bytes:
    data = source.recv(size)
    while len(data) < size:
        if not data:
            raise EOFError
        more = source.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def pack_batch(batch: Batch) -> tuple[Any, ...]:
    """Return a batch as plain data."""
    drafted, moves = batch.drafted, batch.moves
    return (
        batch.scheduled,
        batch.context,
        batch.emits,
        batch.kind,
        batch.preempted,
        batch.ignored,
        batch.lost,
        batch.fatal,
        batch.held and tuple(batch.held),
        batch.aside,
        [tuple(cause) for cause in batch.causes],
        {i: tuple(refusal) for i, refusal in batch.refused.items()},
        batch.lora_loads,
        drafted and (drafted.passes, drafted.tokens, list(drafted.padding)),
        moves and (_plain(moves.loads), _plain(moves.stores), moves.flush),
    )


def _plain(copies: list[KvCopy]) -> list[tuple[int, ...]]:
    return [tuple(copy) for copy in copies]


def unpack_batch(data: tuple[Any, ...]) -> Batch:
    """Return the batch that ``pack_batch`` has packed."""
    scheduled, context, emits, kind, preempted, ignored, lost, fatal, held, aside, *rest = data
    causes, refused, lora_loads, drafted, moves = rest
    batch = Batch(scheduled, context, emits, kind, preempted, ignored, lost, fatal)
    batch.held = held and Held(*held)
    batch.aside = aside
    batch.causes = [PreemptionCause(*cause) for cause in causes]
    batch.refused = {i: Refusal(*refusal) for i, refusal in refused.items()}
    batch.lora_loads = lora_loads
    if drafted:
        batch.drafted = DraftedTokens(drafted[0], drafted[1], set(drafted[2]))
    if moves:
        loads, stores, flush = moves
        batch.moves = KvCopies(
            [KvCopy(*one) for one in loads], [KvCopy(*one) for one in stores], flush
        )
    return batch


def pack_completion(completion: Completion) -> tuple[list[int], list[int], list[int]]:
    """Return a completion as plain data."""
    return completion.delivered, completion.finished, completion.refused
