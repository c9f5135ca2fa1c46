"""Rebuild sessions from arrivals and prefix-cache hits.

In a session, each prompt extends the previous prompt.

The statistics lines report, for each interval, the computed prompt tokens and the fraction of
prompt tokens found in the prefix cache. In a session, the found tokens are the previous prompt, and
the computed tokens are new in the turn. A running request of a session holds its whole prompt in
the cache; other requests share the blocks of a common beginning. Turns are assigned to sessions so
that the cumulative hits follow the log. A turn continues the session that became free last, and a
new session starts if the hits would otherwise exceed the logged hits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.incident.log_windows import LogWindows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: Number of requests that a logged hit rate covers (vLLM: ``PrefixCachingMetrics``).
HIT_RATE_REQUESTS = 1000
#: Minimum time between two prompts of a session, as a fraction of the mean time in the system. The
#: first fraction is used if the resulting prompts agree with the log within ``MAX_TOKEN_ERROR``.
FREE_AFTER = (0.7, 0.4, 0.1, 0.0)
MAX_TOKEN_ERROR = 0.02
#: Maximum fraction of the prompt tokens whose cached blocks may be evicted before their reuse.
MAX_LOST_HITS = 0.03
#: Number of lines over which the tokens in the cache per running request are averaged.
SMOOTHED_LINES = 5
#: Maximum hit rate that is used, because a rate of 1 does not determine the number of tokens.
MAX_HIT_RATE = 0.99


@dataclass(frozen=True)
class PromptTokens:
    """Prompt tokens of each interval.

    ``computed`` excludes the tokens found in the cache, and ``whole`` includes them.
    """

    computed: Floats
    whole: Floats


def split_prompt_tokens(
    cut: LogWindows, counts: Floats, *, computed_only: bool, fallback: float
) -> PromptTokens:
    """Return the prompt tokens of each interval, computed and in total.

    ``counts`` contains the number of requests in each interval. ``fallback`` is the hit rate if the
    log has none. ``computed_only`` is true if the logged prompt tokens exclude cached tokens.
    """
    rate = pd.Series(cut.hit_rate).ffill().fillna(fallback).clip(0.0, MAX_HIT_RATE).to_numpy()
    if not computed_only:
        return PromptTokens(cut.prompt * (1 - rate), cut.prompt)
    whole = cut.prompt / (1 - rate)
    seen = np.cumsum(counts)
    block = np.floor(np.maximum(seen - 1e-9, 0.0) / HIT_RATE_REQUESTS).astype(np.int64)
    for one in np.unique(block):
        inside = block == one
        last = np.flatnonzero(inside)[-1]
        if counts[inside].sum() < HIT_RATE_REQUESTS / 2 and one > 0:
            continue  # the hit rate still covers mostly the previous group
        wanted = cut.prompt[inside].sum() / (1 - rate[last])
        if whole[inside].sum() > 0:
            whole[inside] *= wanted / whole[inside].sum()
    return PromptTokens(cut.prompt, np.maximum(whole, cut.prompt))


def tokens_in_cache(
    cut: LogWindows, tokens: PromptTokens, output: float, block: int
) -> PromptTokens:
    """Return the prompt tokens of each interval, estimated from the cache usage of running
    requests.

    ``output`` is the mean number of output tokens of a request. If the size of the cache is
    unknown, ``tokens`` is returned.
    """
    busy = (cut.running > 0) & np.isfinite(cut.held)
    if not busy.any():
        return tokens
    held = pd.DataFrame({"held": cut.held, "running": cut.running})
    held[~busy] = np.nan
    sums = held.rolling(SMOOTHED_LINES, min_periods=1, center=True).sum()
    each = (sums["held"] / sums["running"]).ffill().bfill().to_numpy(np.float64)
    whole = cut.firsts * np.maximum(each - output / 2 - block / 2, 1.0)
    return PromptTokens(tokens.computed, np.maximum(whole, tokens.computed))


def hold_whole_prompts(
    cut: LogWindows, tokens: PromptTokens, count: float, output: float, block: int
) -> bool:
    """Return whether each running request holds its whole prompt in the cache, as in sessions.

    Otherwise, requests only share a common prefix. If the size of the cache is unknown, return
    True.
    """
    busy = (cut.running > 0) & np.isfinite(cut.held)
    if not busy.any():
        return True
    each = cut.held[busy].sum() / cut.running[busy].sum() - block / 2
    whole, own = tokens.whole.sum() / count, tokens.computed.sum() / count
    return bool(abs(each - whole - output / 2) <= abs(each - own - output / 2))


def assign_sessions(
    came: Floats,
    added: Floats,
    target_hits: Floats,
    busy_s: float,
    block: int,
    *,
    warm: bool = False,
) -> tuple[Floats, Ints, Floats]:
    """Return the prompt length and session number of each request, and the initial cache per
    session.

    The initial cache is the number of tokens cached before the first request in the log. ``came``
    contains the arrival times (s). ``added`` contains the number of tokens that each prompt
    computes. ``target_hits`` is the cumulative number of cached tokens in the log at each request.
    A session is busy for up to ``busy_s`` seconds after each arrival.
    """
    wanted = float(target_hits[-1] + np.maximum(added, 1.0).sum()) if len(came) else 0.0
    found = []
    for share in FREE_AFTER:
        result = _assign(came, added, target_hits, share * busy_s, block, warm)
        error = abs(float(result[0].sum()) - wanted)
        if error <= MAX_TOKEN_ERROR * wanted:
            return result
        found.append((error, result))
    return min(found, key=lambda one: one[0])[1]


def lost_hit_share(
    cut: LogWindows, came: Floats, prompts: Floats, sessions: Ints, tokens: float
) -> float:
    """Return the fraction of prompt tokens whose cached blocks were evicted before their reuse.

    Each turn is assumed to take the mean time in the system.
    """
    if not np.isfinite(tokens) or not np.isfinite(cut.held).any() or not len(came):
        return 0.0
    waiting = float((np.nan_to_num(cut.waiting) * cut.width).sum()) / len(came)
    running = float((cut.running * cut.width).sum()) / len(came)
    edges = np.concatenate([[cut.begin[0]], cut.end])
    allocated = np.concatenate([[0.0], np.cumsum(cut.prompt + cut.output)])
    turns = pd.DataFrame({"at": came, "prompt": prompts})
    before = turns.groupby(sessions).shift()
    freed = before["at"].to_numpy(np.float64) + waiting + running
    spent = np.interp(came + waiting, edges, allocated) - np.interp(freed, edges, allocated)
    room = tokens - np.interp(freed, cut.end, np.nan_to_num(cut.held))
    evicted = np.isfinite(freed) & (spent > np.maximum(room, 0.0))
    return float(before["prompt"].to_numpy(np.float64)[evicted].sum() / prompts.sum())


def _assign(
    came: Floats,
    added: Floats,
    target_hits: Floats,
    free_after_s: float,
    block: int,
    warm: bool,
) -> tuple[Floats, Ints, Floats]:
    """Return the result of ``assign_sessions``.

    A session can continue ``free_after_s`` seconds after an arrival. With a ``warm`` cache, the
    first prompt of a new session has the missing cached tokens.
    """
    prompts, sessions = np.zeros(len(came)), np.zeros(len(came), np.int64)
    free_at: list[float] = []
    lengths: list[float] = []
    names: list[int] = []
    before: list[float] = []
    hits = 0.0
    for i, at in enumerate(came.tolist()):
        free = [slot for slot, time in enumerate(free_at) if time <= at]
        lacking = target_hits[i] - hits
        slot = _choose(free, free_at, lengths, lacking)
        if slot is None:
            slot = len(free_at)
            free_at.append(0.0)
            names.append(len(before))
            before.append(max(lacking, 0.0) // block * block if warm else 0.0)
            lengths.append(before[-1])
        elif hits + lengths[slot] // block * block > target_hits[i] + lengths[slot] / 2:
            lengths[slot], names[slot] = 0.0, len(before)
            before.append(0.0)
        found = lengths[slot] // block * block
        hits += found
        lengths[slot] = prompts[i] = found + max(added[i], 1.0)
        sessions[i], free_at[slot] = names[slot], at + free_after_s
    return np.maximum(np.rint(prompts), 1.0), sessions, np.array(before)


def _choose(
    free: list[int], free_at: list[float], lengths: list[float], lacking: float
) -> int | None:
    """Return the session that became free last, or the session with the longest prompt.

    The longest prompt is used if the hits so far are far below the logged hits.
    """
    if not free:
        return None
    latest = max(free, key=lambda slot: free_at[slot])
    return max(free, key=lambda slot: lengths[slot]) if lacking > 2 * lengths[latest] else latest
