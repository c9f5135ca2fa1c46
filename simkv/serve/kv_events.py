"""Publish prefix-cache events as vLLM does, for routers that select replicas by cached prefixes.

Each message contains a batch of events and has three parts:

    [topic, sequence number (8 bytes, big-endian), msgpack of [time, [event, ...], rank]]

A PUB socket sends the messages. A ROUTER socket sends missed batches again on request. The formats
match vLLM 0.33.0 (``vllm/distributed/kv_events.py``). A block's hash covers its tokens and all
preceding tokens, so equal contents have equal hashes on all replicas.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from zmq.asyncio import Context

from simkv.core.block_pool import BlockPool
from simkv.core.errors import InputError
from simkv.schedulers.engine_registry import ENGINES
from simkv.serve.live_simulation import LiveSimulation
from simkv.sim.replica_base import Replica

#: Number of batches that are stored for replay.
REPLAY_BATCHES = 10_000
LARGEST_PORT = 65535
#: Sequence number that marks the end of a replay.
END = (-1).to_bytes(8, "big", signed=True)


#: An event as msgpack data: its ``type`` and fields.
KvEvent = dict[str, Any]


def block_stored(
    name: int, parent: int | None, tokens: array[int], lora: tuple[int, str] | None
) -> KvEvent:
    """Build the event for a block that enters the prefix cache.

    ``name`` is the hash of the block, and ``parent`` is the hash of the preceding block. ``lora``
    is the adapter's number and name, or None.
    """
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": parent,
        "token_ids": tokens.tolist(),
        "block_size": len(tokens),
        "lora_id": lora[0] if lora else None,
        "medium": "GPU",
        "lora_name": lora[1] if lora else None,
        "extra_keys": [[lora[1]] if lora else None],
        "group_idx": 0,
    }


def block_removed(names: list[int]) -> KvEvent:
    """Build the event for blocks that leave the prefix cache."""
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0}


#: Function that returns the first tokens of a request (prompt, then emitted tokens), up to a given
#: number.
TokensOf = Callable[[int, int], "array[int]"]
#: Function that returns the number and name of the adapter of a request, or None.
LoraOf = Callable[[int], tuple[int, str] | None]


class CacheWatcher:
    """Detect blocks that entered or left the prefix cache since the previous call of ``poll``."""

    def __init__(
        self, pool: BlockPool, block_size: int, tokens_of: TokensOf, lora_of: LoraOf
    ) -> None:
        self._pool, self._size, self._tokens_of = pool, block_size, tokens_of
        self._lora_of = lora_of
        self._keys: npt.NDArray[np.int64] = pool.keys().copy()
        self._hashes: dict[int, int] = {}
        self._tables: dict[int, array[int]] = {}

    def poll(self) -> list[KvEvent]:
        """Return the events since the previous call. Removals come first."""
        keys = self._pool.keys()
        changed = np.flatnonzero(keys != self._keys)
        # Only the previous snapshot contains the block table of a request that has just ended.
        tables, self._tables = {**self._tables, **self._pool.tables}, dict(self._pool.tables)
        if not len(changed):
            return []
        gone = [self._hashes[key] for key in self._keys[changed].tolist() if key in self._hashes]
        self._keys = keys.copy()
        events: list[KvEvent] = [block_removed(gone)] if gone else []
        return [*events, *self._stored(changed[keys[changed] > 0], tables)]

    def _stored(
        self, blocks: npt.NDArray[np.int64], tables: dict[int, array[int]]
    ) -> Iterator[KvEvent]:
        """Yield the events for newly cached blocks, in the order of the prompt."""
        fresh = np.zeros(len(self._keys), bool)
        fresh[blocks] = True
        for owner, table in tables.items():
            held = np.frombuffer(table, np.int32) if len(table) else np.zeros(0, np.int32)
            places = np.flatnonzero(fresh[held])
            if not len(places):
                continue
            fresh[held[places]] = False
            yield from self._block_events(owner, table, places.tolist())

    def _block_events(self, owner: int, table: array[int], places: list[int]) -> Iterator[KvEvent]:
        size = self._size
        tokens = self._tokens_of(owner, (places[-1] + 1) * size)
        lora = self._lora_of(owner)
        own_keys = lora[1].encode() if lora else b""
        for place in places:
            above = self._hashes.get(int(self._keys[table[place - 1]])) if place else None
            own = tokens[place * size : (place + 1) * size]
            salt = (above or 0).to_bytes(8, "big") + own_keys
            named = int.from_bytes(blake2b(salt + own.tobytes(), digest_size=8).digest(), "big")
            self._hashes[int(self._keys[table[place]])] = named
            yield block_stored(named, above, own, lora)


class BatchPublisher:
    """Publish event batches on a socket, and send missed batches again on a second socket
    (``replay``).

    Raises InputError if a socket cannot be bound.
    """

    def __init__(self, endpoint: str, replay: str | None, rank: int, topic: str = "") -> None:
        self._rank, self._topic = rank, topic.encode()
        self._retained: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._number = 0
        context = Context.instance()
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._replay_socket = context.socket(zmq.ROUTER) if replay is not None else None
        _bind(self._socket, "--kv-events", _of_rank(endpoint, rank))
        if self._replay_socket is not None and replay is not None:
            _bind(self._replay_socket, "--kv-replay", _of_rank(replay, rank))

    def publish(self, events: list[KvEvent], now: float) -> None:
        """Publish events of time ``now`` (s) as a batch, unless the list is empty."""
        if events:
            payload = msgspec.msgpack.encode([now, events, self._rank])
            frames = (self._topic, self._number.to_bytes(8, "big"), payload)
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._retained.append((self._number, payload))
            self._number += 1

    async def replay(self) -> None:
        """Send missed batches on request, until this coroutine is cancelled."""
        while self._replay_socket is not None:
            frames = await self._replay_socket.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, first = frames
            for number, payload in list(self._retained):
                if number >= int.from_bytes(first, "big"):
                    head = (client, b"", self._topic, number.to_bytes(8, "big"))
                    await self._replay_socket.send_multipart((*head, payload))
            await self._replay_socket.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        """Close the sockets after sending all messages."""
        self._socket.close(linger=500)
        if self._replay_socket is not None:
            self._replay_socket.close(linger=500)


class KvEventPublisher:
    """Publish the cache events of all replicas. Each replica has its own addresses.

    ``where`` contains the address for batches, the address for missed batches (or None) and the
    rank of the first replica. ``loras`` lists the LoRA adapters. ``published`` returns the prefix
    cache of a scheduler (``EngineSpec.published_cache``). Raises InputError if the engine publishes
    no events or if an address cannot be bound.
    """

    def __init__(
        self,
        live: LiveSimulation,
        where: tuple[str, str | None, int],
        block_size: int,
        tokens_of: TokensOf,
        loras: Sequence[str] = (),
        published: Callable[[Any], BlockPool | None] | None = None,
    ) -> None:
        self._live, self._published = live, published
        self._numbers = {name: number for number, name in enumerate(loras, 1)}
        self._endpoint, self._replay, self._first = where
        self._size, self._tokens_of = block_size, tokens_of
        self._of: dict[int, tuple[CacheWatcher, BatchPublisher]] = {}
        for replica in live.replicas:
            self._get(replica)
        live.on_tokens.append(self._publish)

    def _get(self, replica: Replica) -> tuple[CacheWatcher, BatchPublisher]:
        if found := self._of.get(id(replica)):
            return found
        pool = self._published(replica.scheduler) if self._published else None
        if pool is None:
            able = {n: e.published_cache_knob for n, e in ENGINES.items() if e.published_cache}
            expected = " or ".join(f"{name} with {knob}" for name, knob in able.items())
            raise InputError(
                f"--kv-events: this engine does not publish events; expected {expected}"
            )
        rank = self._first + self._live.replicas.index(replica)
        publisher = BatchPublisher(self._endpoint, self._replay, rank)
        watcher = CacheWatcher(pool, self._size, self._tokens_of, partial(self._lora, replica))
        self._of[id(replica)] = watcher, publisher
        return watcher, publisher

    def _lora(self, replica: Replica, number: int) -> tuple[int, str] | None:
        name = replica.record.requests[number].request.lora
        return None if name is None else (self._numbers[name], name)

    def _publish(self, replica: Replica, _: Sequence[int]) -> None:
        watcher, publisher = self._get(replica)
        publisher.publish(watcher.poll(), replica.env.now)

    async def replay(self) -> None:
        """Send missed batches of all replicas on request, until this coroutine is cancelled."""
        await asyncio.gather(*(publisher.replay() for _, publisher in self._of.values()))

    def close(self) -> None:
        """Close the publishers of all replicas."""
        for _, publisher in self._of.values():
            publisher.close()


def _bind(socket: zmq.Socket[Any], option: str, address: str) -> None:
    """Bind a socket to the address of an option. Raises InputError on failure."""
    port = address.rpartition(":")[2]
    expected = "expected an address such as tcp://*:5557"
    if port.isdecimal() and int(port[:9]) > LARGEST_PORT:  # ZMQ takes the port number modulo 65536
        raise InputError(f"{option} {address}: port above {LARGEST_PORT}; {expected}")
    try:
        socket.bind(address)
    except (zmq.ZMQError, ValueError) as error:
        raise InputError(f"{option} {address}: {error}; {expected}") from error


def _of_rank(endpoint: str, rank: int) -> str:
    """Return the address of the replica with the given rank. Each rank has its own port."""
    base, colon, port = endpoint.rpartition(":")
    return f"{base}{colon}{int(port) + rank}" if rank and port.isdecimal() else endpoint
