"""Random token ids of prompts. Tokens that several prompts share have the same ids."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from simkv.core.request import Prompt


def prompt_ids(prompt: Prompt, vocab: int) -> npt.NDArray[np.int32]:
    """Return random token ids of a prompt. Tokens that several prompts share have the same ids."""
    segments = prompt.segments or ((f"u{prompt.id}", 0, prompt.prompt_tokens),)
    pieces = [_stream_ids(stream, start, end, vocab) for stream, start, end in segments]
    return np.concatenate(pieces)


def _stream_ids(stream: str, start: int, end: int, vocab: int) -> npt.NDArray[np.int32]:
    """Return the ids of tokens ``start`` to ``end`` of a stream, from the hash function
    SplitMix64.
    """
    seed = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
    x = np.arange(start + 1, end + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x % np.uint64(vocab)).astype(np.int32)
