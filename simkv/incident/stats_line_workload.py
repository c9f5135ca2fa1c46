"""Sample workloads that match a server's statistics lines, without data on single requests.

The lines report numbers of prompt and output tokens, but no requests. The number of requests is
derived from the mean number of tokens that a running request holds in the cache (its prompt and its
output so far). If output lengths have the mean ``output`` and the coefficient of variation ``cv``,
a running request holds on average

    prompt + output * (1 + cv**2) / 2

tokens, and the ratio of prompt to output tokens is known. Several workloads are sampled, which form
an ensemble. Each member of the ensemble assumes a ``cv`` (1 corresponds to the exponential
distribution, which has maximum entropy for a given mean) and samples, for each interval between two
lines:

- the number of prompts in the interval. It has a Poisson distribution, weighted by the probability
  that gamma distributed prompt lengths add up to the reported number of prompt tokens. The prompt
  lengths are then Dirichlet distributed fractions of this number.
- gamma distributed output lengths. Iterative scaling (the least change in entropy) adjusts the
  lengths until every interval emits the reported number of tokens; the sampled lengths are then
  assigned in the order of the adjusted lengths. The time per token follows from the number of
  tokens that the running requests emitted in the interval. It is multiplied by an error factor,
  sampled once per member, because the number of running requests between two lines is unknown.
- arrivals. Their number is the number of prefilled requests plus the increase in waiting requests;
  requests are assumed to be served in order of arrival. They arrive at uniformly distributed times
  (a Poisson process, given the number), or a fraction of them arrives at once. If no request waits
  at the start and the end of an interval, requests arrive when they are prefilled.

SGLang's lines report the number of prompts, so ``cv`` is derived from the cache usage. If a log has
lines ``Received request``, the arrivals are taken from them, and the number of prefilled requests
is the number of arrivals that no longer wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp
from scipy.stats import gamma

from simkv.incident.evidence import UndeterminedError
from simkv.incident.log_windows import (
    LogWindows,
    build_windows,
    split_by_engine,
    with_initial_state,
)
from simkv.incident.session_rebuild import (
    MAX_LOST_HITS,
    PromptTokens,
    assign_sessions,
    hold_whole_prompts,
    lost_hit_share,
    split_prompt_tokens,
    tokens_in_cache,
)
from simkv.incident.stats_line_departures import admission_times, match_completions, token_clock
from simkv.incident.workload_ensemble import BURST_SHARES, sample_arrival_shares

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: Coefficients of variation of outputs that the members use in turn if the lines do not determine
#: it, and the coefficient of variation of prompts.
OUTPUT_VARIATIONS, PROMPT_VARIATION = (0.3, 0.6, 1.0), 0.7
#: Computation time of a prompt token as a fraction of a decode step; see ``initial_costs``.
PREFILL_TOKEN_COST = 1 / 270
#: Maximum ratio between the numbers of requests that different assumptions on prefix hits imply.
COUNT_FACTOR = 1.5
#: Maximum relative error of the total prompt tokens of reconstructed sessions.
MAX_LENGTH_ERROR = 0.05
#: Accepted error of the time per token, and the number of rounds of the scaling.
TPOT_ERROR, SCALING_ROUNDS = 0.05, 60
#: Time between two requests that warm up the cache, relative to their prefill time.
WARM_UP_SPACING = 2.0


@dataclass(frozen=True)
class KnownEngine:
    """Known properties of the engine.

    ``tokens`` is the cache capacity in tokens (NaN if unknown), and ``block`` is the block size in
    tokens. ``longest`` is the maximum request length in tokens. ``shared`` is the fraction of
    prompt tokens found in the cache. ``computed_only`` is true if the logged prompt tokens exclude
    cached tokens. ``started`` is true if the log begins with the start of the server.
    """

    tokens: float
    block: int
    longest: int
    shared: float = 0.0
    computed_only: bool = True
    started: bool = True


@dataclass(frozen=True)
class _Means:
    """Number of requests, and mean and coefficient of variation of output tokens."""

    count: float
    output: float
    vary: float


def sample_from_lines(
    series: pd.DataFrame, known: KnownEngine, seed: int, arrivals: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Return the requests of one sampled workload that matches the statistics lines.

    The table has the columns of ``read_measured_latencies`` and a column ``engine``. ``arrivals``
    contains the logged arrivals, if there is only one engine. Raises UndeterminedError if the
    number of requests cannot be determined.
    """
    luck = np.random.default_rng(seed)
    found = []
    if arrivals is not None and series["engine"].nunique() == 1:
        arrivals = arrivals[arrivals["gave_up_s"].isna()].sort_values("t_s", ignore_index=True)
    else:
        arrivals = None
    for engine, lines in split_by_engine(series).items():
        # One line may cover several engines.
        cut = build_windows(lines, known.tokens * max(-engine, 1))
        if cut.prompt.sum() > 0 and cut.output.sum() > 0:
            cut = cut if known.started else with_initial_state(cut)
            if arrivals is not None:
                cut = replace(cut, firsts=_begun(cut, arrivals["t_s"].to_numpy(np.float64)))
            drawn = _drawn(cut, known, seed, luck, arrivals)
            found.append(drawn.assign(engine=engine))
    if not found:
        raise UndeterminedError("no statistics line reports computed tokens")
    return pd.concat(found).sort_values("t_s", kind="stable", ignore_index=True)


def _begun(cut: LogWindows, came: Floats) -> Floats:
    """Return the number of requests that were prefilled in each interval, from the arrivals
    ``came``.
    """
    there = np.searchsorted(came, cut.end, "right") - np.nan_to_num(cut.waiting)
    there = np.where(cut.prompt > 0, np.maximum(there, 0.0), 0.0)
    return np.diff(np.maximum.accumulate(there), prepend=0.0)


def _drawn(
    cut: LogWindows,
    known: KnownEngine,
    seed: int,
    luck: np.random.Generator,
    told: pd.DataFrame | None,
) -> pd.DataFrame:
    left_out = known.shared if known.computed_only else 0.0
    whole = cut.prompt / (1 - left_out)
    vary = OUTPUT_VARIATIONS[seed % len(OUTPUT_VARIATIONS)]
    tokens = None
    if told is not None and known.shared > 0:
        whole, tokens = _session_tokens(cut, known)
        known = known if tokens is None else replace(known, shared=0.0)
    means = _means(cut, whole, known, vary)
    counts = _counts(cut, whole, means.count, luck)
    prompts = _prompts(whole, counts, luck)
    pace, rough = _pace(cut)
    pace = pace * np.exp(luck.normal(0.0, rough))
    which = np.repeat(np.arange(len(counts)), counts)
    at_once = BURST_SHARES[seed % len(BURST_SHARES)]
    if told is None:
        share = [sample_arrival_shares(count, at_once, luck) for count in counts.tolist()]
        first = cut.begin[which] + np.concatenate(share) * cut.width[which]
    else:
        first = admission_times(cut, told["t_s"].to_numpy(np.float64), counts)
    order = np.argsort(first, kind="stable")
    first, prompts = first[order], prompts[order]
    prompts = np.minimum(prompts, known.longest - 1)
    session, warm = None, np.zeros(0)
    if told is not None and tokens is not None:
        prompts, session, warm = _sessions(cut, tokens, told, counts, known, luck)
    everyone = np.zeros(0)
    if told is not None:  # first come, first served
        everyone = told["t_s"].to_numpy(np.float64)
        told = told.head(len(first))
        first, prompts = first[: len(told)], _told(told, "prompt_tokens", prompts[: len(told)])
    token_s = PREFILL_TOKEN_COST * float(np.quantile(pace, 0.1))
    initial = np.zeros(0)
    if told is None:
        came = _arrivals(cut, counts, first - prompts * token_s, at_once, luck)
        initial, begun = _initial_outputs(cut, means, float(pace[0]), luck)
        each = np.array([whole.sum() / max(counts.sum(), 1) * len(initial)])
        before = np.minimum(_prompts(each, np.array([len(initial)]), luck), known.longest - 1)
        prompts, first = np.concatenate([before, prompts]), np.concatenate([begun, first])
        came = np.concatenate([begun - before * token_s, came])
    prefill, longest = prompts * token_s, known.longest - prompts
    if told is not None:
        came = told["t_s"].to_numpy(np.float64)
        first = np.maximum(first, came + prefill)
        longest = np.minimum(longest, _told(told, "max_tokens", longest))
    outputs, end = _outputs(cut, pace, first, longest, means, luck, initial)
    if told is not None:
        outputs, end = match_completions(cut, pace, everyone, first, end)
        earlier = np.maximum(cut.begin[0] - first, 0.0).sum() / pace[0]
        share = (cut.output.sum() + earlier) / outputs.sum()
        outputs = np.clip(outputs * share, 1.0, np.maximum(longest, 1.0))
    found = _latencies(came, first, end, prompts, np.rint(outputs), prefill)
    if told is not None:
        found = found.assign(max_tokens=told["max_tokens"], request=told["request"])
    if session is None:
        return found
    found = found.assign(session=session[: len(found)])
    return pd.concat([_warm_up(warm, float(came.min()), token_s), found], ignore_index=True)


def _session_tokens(cut: LogWindows, known: KnownEngine) -> tuple[Floats, PromptTokens | None]:
    """Return the prompt tokens of each interval and, for sessions, their computed and total tokens.

    If a log begins while the server is working, its first hit rates describe earlier requests.
    """
    tokens = split_prompt_tokens(
        cut, cut.firsts, computed_only=known.computed_only, fallback=known.shared
    )
    count = float(cut.firsts.sum())
    output = cut.output.sum() / count
    if not hold_whole_prompts(cut, tokens, count, output, known.block):
        return tokens.whole, None
    if not known.started:
        tokens = tokens_in_cache(cut, tokens, output, known.block)
    return tokens.whole, tokens


def _latencies(
    came: Floats, first: Floats, end: Floats, prompts: Floats, outputs: Floats, prefill: Floats
) -> pd.DataFrame:
    """Return the table of requests, given their times (s) and lengths (tokens)."""
    ttft, whole_s = first - came, np.maximum(end - came, first - came)
    return pd.DataFrame(
        {
            "t_s": came,
            "prompt_tokens": prompts.astype(np.int64),
            "output_tokens": outputs.astype(np.int64),
            "max_tokens": 0,
            "queue_ms": 1e3 * (ttft - prefill),
            "prefill_ms": 1e3 * prefill,
            "ttft_ms": 1e3 * ttft,
            "tpot_ms": np.where(
                outputs > 1, 1e3 * (end - first) / np.maximum(outputs - 1, 1), np.nan
            ),
            "e2e_ms": 1e3 * whole_s,
        }
    )


def _warm_up(warm: Floats, until: float, token_s: float) -> pd.DataFrame:
    """Return one request per session that fills the prefix cache before the log begins.

    ``warm`` contains the numbers of cached tokens of the sessions. The requests run one after the
    other and end before ``until`` (s). They have no observed latency.
    """
    sessions = np.flatnonzero(warm > 0)
    prompts = warm[sessions]
    spent = WARM_UP_SPACING * prompts * token_s
    return pd.DataFrame(
        {
            "t_s": until - np.cumsum(spent[::-1])[::-1],
            "prompt_tokens": prompts.astype(np.int64),
            "output_tokens": 1,
            "max_tokens": 0,
            "session": sessions,
            "warm_up": True,
        }
    )


def _sessions(
    cut: LogWindows,
    tokens: PromptTokens,
    told: pd.DataFrame,
    counts: Ints,
    known: KnownEngine,
    luck: np.random.Generator,
) -> tuple[Floats, Ints, Floats]:
    """Return the prompt length and the session of each request with a known arrival, in order.

    The third value is the number of tokens of each session that are cached when the log begins.
    """
    which = np.repeat(np.arange(len(counts)), counts)
    added = _prompts(tokens.computed, counts, luck)
    hits = np.maximum(tokens.whole - tokens.computed, 0.0)
    before = np.concatenate([[0.0], np.cumsum(hits)[:-1]])
    place = np.arange(len(which)) - np.searchsorted(which, which, "left") + 1
    target = before[which] + hits[which] * place / np.maximum(counts[which], 1)
    came = told["t_s"].to_numpy(np.float64)[: len(which)]
    present = cut.running + np.nan_to_num(cut.waiting)
    busy_s = float((present * cut.width).sum()) / max(len(which), 1)
    count = len(came)
    prompts, sessions, warm = assign_sessions(
        came, added[:count], target[:count], busy_s, known.block, warm=not known.started
    )
    prompts = np.minimum(prompts, known.longest - 1)
    _check_sessions(cut, tokens, came, prompts, sessions, known)
    return prompts, sessions, warm


def _check_sessions(
    cut: LogWindows,
    tokens: PromptTokens,
    came: Floats,
    prompts: Floats,
    sessions: Ints,
    known: KnownEngine,
) -> None:
    """Raise UndeterminedError if the sessions do not reproduce the logged numbers of tokens and
    hits.
    """
    others = "a client's results or spans determine the requests"
    lost = lost_hit_share(cut, came, prompts, sessions, known.tokens)
    if lost > MAX_LOST_HITS:
        raise UndeterminedError(
            "the sessions cannot be determined: the KV cache is too small to keep the prompts "
            f"of sessions between two turns (evictions cause {100 * lost:.0f} % of the prompt "
            "tokens to be recomputed), and the log does not report which turns were cached; "
            f"{others}"
        )
    whole = float(tokens.whole.sum())
    if abs(prompts.sum() - whole) > MAX_LENGTH_ERROR * whole:
        raise UndeterminedError(
            "the lengths of the prompts cannot be determined: no assignment of requests to "
            f"sessions gives the {whole:,.0f} prompt tokens and the hit rate of the log (the "
            f"closest assignment has {prompts.sum():,.0f} prompt tokens); {others}"
        )


def _told(arrivals: pd.DataFrame, name: str, otherwise: Floats) -> Floats:
    """Return the reported number of tokens, or ``otherwise`` if it is unknown."""
    tokens = arrivals[name].to_numpy(np.float64)
    return np.where(tokens > 0, tokens, otherwise)


def _means(cut: LogWindows, whole: Floats, known: KnownEngine, vary: float) -> _Means:
    """Return the means, estimated from the number of tokens that running requests hold in the
    cache.
    """
    output, told = cut.output.sum(), cut.firsts[np.isfinite(cut.firsts)].sum()
    busy = (cut.running > 0) & np.isfinite(cut.held)
    if not busy.any() and not told:
        raise UndeterminedError(
            "the number of requests cannot be determined: the log has no access lines, and the "
            "size or the usage of the KV cache is unknown (include the beginning of the log, "
            "or use --gpu and --model, or set the size with --set engine.NAME=N)"
        )
    each = (
        cut.held[busy].sum() / cut.running[busy].sum() - known.block / 2 if busy.any() else np.nan
    )
    own = (1 - known.shared) * whole.sum()
    if told:
        mean = output / told
        open_ = 2 * (each - own / told) / mean - 1 if busy.any() else vary**2
        return _Means(told, mean, float(np.sqrt(np.clip(open_, 0.05, 4.0))))
    mean = max(each, 1.0) / (own / output + (1 + vary**2) / 2)
    _check_count(whole.sum(), output, each, known)
    return _Means(max(output / mean, 1.0), mean, vary)


def _check_count(whole: float, output: float, each: float, known: KnownEngine) -> None:
    """Raise UndeterminedError if the estimated number of requests is too uncertain.

    The number depends on how prompts share cached tokens: a common beginning, which running
    requests share, or sessions, whose running requests hold their whole prompts.
    """
    shared = known.shared if known.shared > 0 else 0.0
    least = ((1 - shared) * whole + output / 2) / max(each, 1.0)
    most = (whole + output) / max(each, 1.0)
    if shared > 0 and (whole + output / 2) / ((1 - shared) * whole + output / 2) > COUNT_FACTOR:
        raise UndeterminedError(
            f"the number of requests cannot be determined: {100 * shared:.0f} % of the prompt "
            f"tokens were cached, so any number from {least:.0f} to {most:.0f} requests agrees "
            "with the log. To determine the number, start the server without "
            "--disable-uvicorn-access-log or with --enable-log-requests, or add the results of "
            "a client"
        )


def _counts(cut: LogWindows, whole: Floats, count: float, luck: np.random.Generator) -> Ints:
    """Return a sample of the number of requests prefilled in each interval."""
    if np.isfinite(cut.firsts).all():
        return np.asarray(np.maximum(np.rint(cut.firsts), whole > 0), np.int64)
    mean, shape = whole.sum() / count, PROMPT_VARIATION**-2
    places = np.flatnonzero(whole > 0)
    numbers, logs = [], []
    for tokens in whole[places].tolist():
        likely = tokens / mean
        low, high = (
            max(int(likely - 8 * np.sqrt(likely) - 8), 1),
            int(likely + 8 * np.sqrt(likely)) + 9,
        )
        n = np.arange(low, high + 1)
        poisson = n * np.log(likely) - gammaln(n + 1)
        numbers.append(n)
        logs.append(poisson + gamma.logpdf(tokens, n * shape, scale=mean / shape))

    def expected(tilt: float) -> float:
        return sum(
            float((n * np.exp(log + tilt * n - logsumexp(log + tilt * n))).sum())
            for n, log in zip(numbers, logs, strict=True)
        )

    least, most = expected(-20.0), expected(20.0)
    aim = min(max(count, least + 1e-6), most - 1e-6)
    tilt = (
        float(brentq(lambda t: expected(t) - aim, -20.0, 20.0, xtol=1e-4)) if least < most else 0.0
    )
    found = np.zeros(len(whole), np.int64)
    for place, n, log in zip(places.tolist(), numbers, logs, strict=True):
        chance = np.exp(log + tilt * n - logsumexp(log + tilt * n))
        found[place] = luck.choice(n, p=chance / chance.sum())
    return found


def _prompts(whole: Floats, counts: Ints, luck: np.random.Generator) -> Floats:
    """Return gamma distributed prompt lengths, given their sum in each interval."""
    shares = luck.gamma(PROMPT_VARIATION**-2, size=int(counts.sum()))
    which = np.repeat(np.arange(len(counts)), counts)
    sums = np.bincount(which, shares, len(counts))
    return np.asarray(np.maximum(np.rint(shares * (whole / np.maximum(sums, 1e-300))[which]), 1.0))


def _pace(cut: LogWindows) -> tuple[Floats, float]:
    """Return the seconds per token of a running request in each interval, and their relative error.

    Each value is a mean over neighboring intervals, because the number of running requests is
    unknown between two lines.
    """
    before = np.concatenate([[cut.initial_running], cut.running[:-1]])
    silent = np.concatenate([[False], np.diff(cut.end) > 1.5 * cut.width[1:]])
    before = np.where(silent, 0.0, before)
    present = (before + cut.running) / 2
    unsure = (before - cut.running) ** 2 / 12
    spent, tokens, seen, doubt = (
        np.concatenate([[0.0], np.cumsum(each)])
        for each in (present * cut.width, cut.output, present, unsure)
    )
    low, high = np.arange(len(present)), np.arange(len(present)) + 1
    for _ in range(len(present)):
        rough = np.sqrt(doubt[high] - doubt[low]) > TPOT_ERROR * (seen[high] - seen[low])
        rough |= tokens[high] <= tokens[low]
        if not (rough & ((low > 0) | (high < len(present)))).any():
            break
        low = np.where(rough, np.maximum(low - 1, 0), low)
        high = np.where(rough, np.minimum(high + 1, len(present)), high)
    found = (spent[high] - spent[low]) / np.maximum(tokens[high] - tokens[low], 1e-9)
    found = np.where(found > 0, found, max(float(spent[-1] / tokens[-1]), 1e-4))
    # Prefills take a part of the time of running requests.
    prefills = cut.prompt.sum() * PREFILL_TOKEN_COST * float(np.quantile(found, 0.1))
    own = max(1 - prefills / max(float(spent[-1]), 1e-9), 0.3)
    return np.asarray(found * own), float(np.sqrt(doubt[-1]) / max(float(seen[-1]), 1e-9))


def _initial_outputs(
    cut: LogWindows, means: _Means, pace: float, luck: np.random.Generator
) -> tuple[Floats, Floats]:
    """Return sampled output tokens and first-token times of the requests that run when the log
    begins.

    A long request is more likely to run at a given time than a short request (length bias). The
    number of tokens emitted so far is uniformly distributed from 0 to the output length.
    """
    count, shape = cut.initial_running, means.vary**-2
    outputs = np.maximum(luck.gamma(shape + 1, means.output / shape, count), 1.0)
    begun = np.sort(cut.begin[0] - luck.random(count) * outputs * pace)
    return outputs, begun


def _outputs(
    cut: LogWindows,
    pace: Floats,
    first: Floats,
    longest: Floats,
    means: _Means,
    luck: np.random.Generator,
    initial: Floats,
) -> tuple[Floats, Floats]:
    """Return sampled output tokens of requests with given first-token times, and their end times.

    ``initial`` contains the output tokens of requests that already ran when the log began. Time is
    measured as the number of tokens that a running request emits. All requests end before an
    interval without running requests ends.
    """
    times, clock = token_clock(cut, pace)
    start = np.interp(first, times, clock)
    ends = clock[2:-1]
    idle = ends[cut.running == 0]
    after = np.searchsorted(idle, start, "left")
    most = np.where(after < len(idle), np.append(idle, np.inf)[after], np.inf) - start
    most = np.minimum(most, longest)
    old = len(initial)
    lengths = luck.gamma(means.vary**-2, size=len(first))
    left = cut.output.sum() - np.maximum(initial + start[:old], 0.0).sum()
    lengths *= max(left, float(len(first) - old)) / max(lengths[old:].sum(), 1e-9)
    lengths[:old] = initial
    least = np.maximum(np.where(np.arange(len(first)) < old, 1.0 - start, 1.0), 1.0)
    most = np.maximum(most, least)
    wanted = lengths
    edges = np.concatenate([[0.0], ends])
    for _ in range(SCALING_ROUNDS):
        wanted = np.clip(wanted, least, most)
        made = np.diff(_emitted(start, wanted, edges))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(
                np.clip(np.nan_to_num(cut.output / made, nan=1.0, posinf=4.0), 0.25, 4.0)
            )
        grown = np.concatenate([[0.0], np.cumsum(ratio * np.diff(edges))])
        over = np.interp(start + wanted, edges, grown) - np.interp(start, edges, grown)
        wanted = wanted * np.exp(np.clip(over / wanted, -1.0, 1.0))
    # Keep the rank order; take lengths from the gamma sample.
    by_rank = wanted.copy()
    by_rank[old + np.argsort(wanted[old:], kind="stable")] = np.sort(lengths[old:])
    wanted = np.clip(by_rank, least, most)
    return wanted, np.interp(start + wanted - 1, clock, times)


def _emitted(start: Floats, wanted: Floats, edges: Floats) -> Floats:
    """Return the number of tokens that all requests together have emitted until each time in
    ``edges``.
    """

    def passed(points: Floats) -> Floats:
        points = np.sort(points)
        sums = np.concatenate([[0.0], np.cumsum(points)])
        many = np.searchsorted(points, edges, "right")
        return np.asarray(many * edges - sums[many])

    return passed(start) - passed(start + wanted)


def _arrivals(
    cut: LogWindows, counts: Ints, ready: Floats, at_once: float, luck: np.random.Generator
) -> Floats:
    """Return sampled arrival times of requests, in the order in which they are first scheduled.

    ``ready`` contains the times at which they are first scheduled.
    """
    waiting = np.rint(np.nan_to_num(cut.waiting))
    came = np.maximum.accumulate(np.cumsum(counts) + waiting)
    early = min(cut.initial_waiting, int(counts.sum()))
    new = np.diff(np.minimum(came, counts.sum()), prepend=early).astype(np.int64)
    queued = (waiting > 0) | (np.concatenate([[0.0], waiting[:-1]]) > 0)
    found = [np.full(early, cut.begin[0])]
    for place in np.flatnonzero(new).tolist():
        some = (
            cut.begin[place]
            + sample_arrival_shares(int(new[place]), at_once, luck) * cut.width[place]
        )
        found.append(np.sort(some) if queued[place] else np.full(int(new[place]), np.inf))
    return np.asarray(np.minimum(np.concatenate(found), ready))
