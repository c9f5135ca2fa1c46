"""Reconstruct the workload from the evidence: arrival and lengths of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.incident import trtllm_log_reader
from simkv.incident.access_arrivals import arrivals_from_access
from simkv.incident.evidence import Evidence, UndeterminedError
from simkv.incident.log_findings import FULL_CACHE
from simkv.incident.log_windows import (
    build_windows,
    can_build_windows,
    series_from_steps,
    with_initial_state,
)
from simkv.incident.logged_step_costs import has_enough_steps
from simkv.incident.server_setup import ServerSetup, kv_tokens
from simkv.incident.source_reader import log_reader, logs_iterations
from simkv.incident.stats_line_workload import KnownEngine, sample_from_lines
from simkv.incident.workload_ensemble import can_sample, sample_workload
from simkv.incident.worst_part import CUT_NOTE
from simkv.schedulers.engine_registry import ENGINES, find_engine_spec
from simkv.workload.request_columns import NAMED_STREAM, PromptPieces, RequestRows
from simkv.workload.trace_source import TraceSource

#: Prefix-cache hit rates below this are ignored.
MIN_HIT_RATE = 0.02
#: Minimum number of statistics lines for a reconstruction if the start of the server is not logged.
MIN_LINES = 12
#: Relative difference between two capacities above which a cache counts as hybrid.
HYBRID_DIFFERENCE = 0.05
#: Minimum number of access lines for which the access lines count as complete.
MIN_ACCESS_LINES = 5
#: Settings that a server logs at start-up.
START_SETTINGS = (
    "version",
    "num_gpu_blocks",
    "kv_tokens",
    "model",
    "model_path",
    "max_total_num_tokens",
)
#: vLLM's connectors between prefill and decode servers; each side may have the role ``kv_both``.
_DISAGGREGATED = ("NixlConnector", "P2pNcclConnector", "MooncakeConnector")
#: Log times are whole seconds; arrivals in two sources within this time (s) are the same request.
SAME_ARRIVAL_S = 1.5


@dataclass(frozen=True)
class RebuiltWorkload:
    """Requests in order of arrival. Time 0 is ``origin`` (s on the clock of the evidence).

    ``observed`` contains the latencies of the requests in the same order (NaN if unknown).
    """

    rows: RequestRows
    origin: float
    observed: pd.DataFrame
    notes: tuple[str, ...]


def rebuild(
    evidence: Evidence,
    source: TraceSource,
    setup: ServerSetup,
    seed: int = 0,
) -> RebuiltWorkload:
    """Return the requests of the sources, or a sample without data on single requests.

    ``seed`` is the random seed of the sample. Prompts get a common prefix that leads to the logged
    hit rate, unless a source shows which prompts share a prefix. Raises InputError if the sources
    have no information about requests.
    """
    caching = setup.engine.get("enable_prefix_caching") is not False
    requests, notes = evidence.requests, list[str]()
    check_determined(evidence)
    share = _hit_share(evidence.series) if caching else 0.0
    if is_sampled(evidence):
        requests = _sample(evidence, setup, share if share > MIN_HIT_RATE else 0.0, seed, notes)
    if requests is None:
        requests = _only_arrivals(evidence.arrivals)
    if requests is None or not len(requests):
        if role := server_role(evidence):
            raise UndeterminedError(describe_missing_side(evidence, role))
        raise UndeterminedError(
            f"{evidence.source} contains no data on single requests; add spans "
            "(--otlp-traces-endpoint), the results of a client, or metrics with histograms"
        )
    whole = _with_missing(requests, evidence.arrivals, notes)
    whole = _lengths(whole, notes)
    if "warm_up" in whole and (count := int(whole["warm_up"].notna().sum())):
        notes.append(
            f"{count} requests before the log fill the prefix cache with the prompts of sessions"
        )
    origin = float(whole["t_s"].iloc[0])
    rows = RequestRows(
        arrival=(whole["t_s"] - origin).to_numpy(np.float64),
        prompt_tokens=np.maximum(whole["prompt_tokens"].to_numpy(np.int64), 1),
        output_tokens=whole["emits"].to_numpy(np.int64),
        max_tokens=whole["max_tokens"].to_numpy(np.int64),
        timeout=whole["gave_up_s"].to_numpy(np.float64),
    )
    if caching and "session" in whole and whole["session"].nunique() < len(whole):
        rows.pieces = session_pieces(whole["session"].tolist(), rows.prompt_tokens, source)
        notes.append("each prompt of a session is assumed to extend the previous one")
    elif caching and "cached_tokens" in whole and whole["cached_tokens"].max() > 0:
        rows.pieces = _found(whole, source)
        notes.append(
            "all requests with cached tokens are assumed to share the same prefix; the first "
            "of them that is long enough computes it"
        )
    elif share > MIN_HIT_RATE:
        rows.pieces = _common(rows, share, source)
        notes.append(
            f"all prompts are assumed to have a common beginning: {100 * share:.0f} % of their "
            "tokens were found in the prefix cache, and no source identifies them"
        )
    return RebuiltWorkload(rows, origin, whole.drop(columns=["emits"]), tuple(notes))


def server_role(evidence: Evidence) -> str | None:
    """Return the role of the server in a disaggregated deployment, or None.

    The role is ``prefill``, ``decode`` or, if unknown, ``prefill or decode``.
    """
    mode = evidence.settings.get("disaggregation_mode")
    if mode is not None and mode.value in ("prefill", "decode"):
        return str(mode.value)
    transfer = evidence.settings.get("kv_transfer_config")
    for role, word in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        if transfer is not None and word in str(transfer.value):
            return role
    if transfer is not None and any(name in str(transfer.value) for name in _DISAGGREGATED):
        return "prefill or decode"
    return None


def describe_missing_side(evidence: Evidence, role: str) -> str:
    """Return a sentence that asks for the log of the missing prefill or decode server."""
    missing = {
        "prefill": "output lengths, decode times and the ends of requests are in the log of the "
        "decode server",
        "decode": "arrivals, queue times and prefill times are in the log of the prefill server",
    }
    reader = log_reader(evidence.engine)
    flag = reader.REQUEST_FLAGS if reader else None
    start = f"Start the servers with {flag} to log single requests, or add" if flag else "Add"
    return (
        f"{evidence.source} is the log of a {role} server; "
        f"{missing.get(role, 'the other part of each request is in the log of the other server')}. "
        f"{start} a client's results"
    )


def has_access(evidence: Evidence) -> bool:
    """Return whether access lines count the requests of a single engine."""
    access, series = evidence.access, evidence.series
    if access is None or series is None or access["accepted"].sum() < MIN_ACCESS_LINES:
        return False
    return int(series["engine"].nunique()) == 1 and "prompts" not in series


def _describe_access(arrivals: pd.DataFrame, already: int) -> list[str]:
    notes = [f"{len(arrivals)} arrivals are counted from access lines between lines with a time"]
    if already:
        notes.append(f"{already} of these requests arrived before the log begins")
    return notes


def check_determined(evidence: Evidence) -> None:
    """Raise UndeterminedError if there are too few statistics lines to reconstruct a workload."""
    if not is_from_lines(evidence) or evidence.arrivals is not None:
        return
    if role := server_role(evidence):
        raise UndeterminedError(describe_missing_side(evidence, role))
    if evidence.engine == trtllm_log_reader.ENGINE:
        raise UndeterminedError(trtllm_log_reader.LACKS)
    if not evidence.wall:
        raise UndeterminedError("the statistics lines have no times")
    assert evidence.series is not None
    lines = int(evidence.series.groupby("engine").size().max())
    if lines < MIN_LINES and not evidence.settings and evidence.steps is None:
        raise UndeterminedError(
            f"{lines} statistics lines are too few to reconstruct requests; give at least "
            f"{MIN_LINES} lines, or the log from the start of the server"
        )


def _sample(
    evidence: Evidence, setup: ServerSetup, share: float, seed: int, notes: list[str]
) -> pd.DataFrame:
    """Return requests that match the reported sums or the log lines. ``share`` is the prefix hit
    rate.
    """
    assert evidence.series is not None
    if can_sample(evidence.histograms):
        return sample_workload(evidence.histograms, evidence.series, seed)
    known, series, arrivals = _known(setup, share, evidence), evidence.series, evidence.arrivals
    if (lines := _iterations(evidence, setup)) is not None:
        series, known = lines, replace(known, computed_only=True)
    if arrivals is None and has_access(evidence):
        assert evidence.access is not None
        initial = 0
        if not known.started:
            cut = with_initial_state(build_windows(series, known.tokens))
            initial = cut.initial_running + cut.initial_waiting
        arrivals, already = arrivals_from_access(evidence.access, series, seed, initial=initial)
        notes += _describe_access(arrivals, already)
    return sample_from_lines(series, known, seed, arrivals)


def is_sampled(evidence: Evidence) -> bool:
    """Return whether requests must be sampled because no source has data on single requests."""
    if evidence.requests is not None or evidence.series is None:
        return False
    return can_sample(evidence.histograms) or is_from_lines(evidence)


def is_from_lines(evidence: Evidence) -> bool:
    """Return whether log lines are the only data on requests, and the engine did not die."""
    if evidence.requests is not None or can_sample(evidence.histograms) or evidence.died:
        return False
    return can_build_windows(evidence.series)


def is_counted(evidence: Evidence) -> bool:
    """Return whether an input states the number of requests, which is otherwise estimated."""
    series = evidence.series
    lines = series is not None and "prompts" in series and bool(series["prompts"].notna().any())
    others = (evidence.requests, evidence.access, evidence.arrivals, evidence.steps)
    return lines or bool(evidence.histograms) or any(one is not None for one in others)


def is_hybrid(evidence: Evidence, capacity: int) -> bool:
    """Return whether the logged capacity in tokens differs from blocks times block size.

    vLLM logs a different capacity for models with several kinds of attention layers.
    """
    logged = evidence.settings.get("kv_tokens")
    if logged is None or "num_gpu_blocks" not in evidence.settings:
        return False
    return abs(float(logged.value) / max(capacity, 1) - 1) > HYBRID_DIFFERENCE


def _known(setup: ServerSetup, shared: float, evidence: Evidence) -> KnownEngine:
    """Return the properties of the engine that are needed to interpret the statistics lines."""
    config = ENGINES[setup.engine["name"]].config(**setup.engine)
    spec = find_engine_spec(config)
    reader = log_reader(spec.name)
    hybrid = is_hybrid(evidence, kv_tokens(config))
    return KnownEngine(
        tokens=kv_tokens(config) if setup.sized and not hybrid else float("nan"),
        block=spec.block_size(config),
        longest=spec.length_limit(config) or 1 << 20,
        shared=shared,
        computed_only=reader is not None and reader.computed_only(config.variant),
        started=begins_with_server(evidence),
    )


def begins_with_server(evidence: Evidence) -> bool:
    """Return whether the statistics lines begin with the start of the server."""
    if any(note.startswith(CUT_NOTE) for note in evidence.notes):
        return False
    return any(name in evidence.settings for name in START_SETTINGS)


def _iterations(evidence: Evidence, setup: ServerSetup) -> pd.DataFrame | None:
    """Return statistics lines built from logged iterations, or None without iterations."""
    steps, series = evidence.steps, evidence.series
    engine = evidence.engine
    if engine is None or not logs_iterations(engine):
        return None
    if steps is None or series is None or not has_enough_steps(steps):
        return None
    if (series["engine"] < 0).any():  # these lines cover several ranks
        return None
    config = ENGINES[engine].config(**setup.engine)
    return series_from_steps(steps, series, config.max_num_batched_tokens)


def _only_arrivals(arrivals: pd.DataFrame | None) -> pd.DataFrame | None:
    """Return requests without answers from arrivals with known prompt lengths, or None."""
    if arrivals is None or not (arrivals["prompt_tokens"] > 0).all():
        return None
    times = dict.fromkeys(("queue_ms", "prefill_ms", "ttft_ms", "tpot_ms", "e2e_ms"), np.nan)
    return arrivals.assign(output_tokens=0, **times)


def _with_missing(
    requests: pd.DataFrame, arrivals: pd.DataFrame | None, notes: list[str]
) -> pd.DataFrame:
    """Return all requests in order of arrival, including requests without a measured answer."""
    whole = requests.copy()
    for name, default in (("max_tokens", 0), ("gave_up_s", np.nan), ("prefill_ms", np.nan)):
        if name not in whole:
            whole[name] = default
    whole["max_tokens"] = whole["max_tokens"].fillna(0).astype(np.int64)
    if arrivals is not None and "request" in whole:
        served = set(whole["request"])
        missing = _unmatched(arrivals[~arrivals["request"].isin(served)], whole)
        begin, end = whole["t_s"].min(), (whole["t_s"] + whole["e2e_ms"].fillna(0) / 1e3).max()
        missing = missing[missing["t_s"].between(begin - 1, end + 1)]
        if len(missing):
            notes.append(
                f"only the arrival of {len(missing)} requests is known; their lengths are the "
                "medians of the other requests"
            )
            whole = pd.concat([whole, missing.assign(output_tokens=0)])
    return whole.sort_values("t_s", kind="stable", ignore_index=True)


def _unmatched(arrivals: pd.DataFrame, whole: pd.DataFrame) -> pd.DataFrame:
    """Return the logged arrivals that match no unanswered request of the client, by time."""
    silent = whole[whole["output_tokens"] == 0]
    left = dict(zip(silent.index.tolist(), silent["t_s"].tolist(), strict=True))
    asked, others = whole["max_tokens"].to_numpy(np.int64).copy(), np.ones(len(arrivals), np.bool_)
    told = zip(arrivals["t_s"].tolist(), arrivals["max_tokens"].tolist(), strict=True)
    for place, (at, most) in enumerate(told):
        near = next((i for i, time in left.items() if abs(time - at) <= SAME_ARRIVAL_S), None)
        if near is not None:
            del left[near]
            others[place] = False
            asked[near] = most or asked[near]
    whole["max_tokens"] = asked
    return arrivals[others]


def _lengths(whole: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Return the requests with a column ``emits``, the number of tokens that each request would
    emit.

    Output limits below this number are raised.
    """
    answered = whole["output_tokens"] > 0
    middle = whole[answered][["prompt_tokens", "output_tokens"]].median()
    emits = whole["output_tokens"].where(answered, whole["max_tokens"])
    emits = emits.where(emits > 0, middle["output_tokens"]).astype(np.int64)
    most = whole["max_tokens"]
    prompts = whole["prompt_tokens"].fillna(0)
    if (count := int((~answered).sum())) and answered.any():
        notes.append(
            f"{count} requests had no answer; their output is assumed to have the requested "
            "length, or the median length"
        )
    return whole.assign(
        emits=emits,
        max_tokens=most.where(most == 0, np.maximum(most, emits)),
        prompt_tokens=prompts.where(prompts > 0, middle["prompt_tokens"]).astype(np.int64),
    )


def _hit_share(series: pd.DataFrame | None) -> float:
    """Return the fraction of prompt tokens found in the prefix cache before the first preemption.

    A request that resumes after a preemption finds its own blocks. Old versions do not log
    preemptions, so a line with waiting requests and a full cache counts as one.
    """
    if series is None or "hit_rate" not in series:
        return 0.0
    known = series.dropna(subset=["hit_rate"])
    full = (known["waiting"] > 0) & (known["usage"] >= FULL_CACHE)
    resumed = known.index[full | (known["preemptions"] > 0)]
    before = known if not len(resumed) else known.loc[: resumed[0] - 1]
    return float(before["hit_rate"].iloc[-1]) if len(before) else 0.0


def session_pieces(
    sessions: Sequence[object], prompts: npt.NDArray[np.int64], source: TraceSource
) -> PromptPieces:
    """Return the prompts as pieces of text.

    Each prompt extends the previous prompt of its session.
    """
    streams = {name: source.streams.number(f"gsession{name}") for name in dict.fromkeys(sessions)}
    return PromptPieces.of(
        [
            [(NAMED_STREAM, streams[name], 0, int(tokens))]
            for name, tokens in zip(sessions, prompts, strict=True)
        ]
    )


def _found(whole: pd.DataFrame, source: TraceSource) -> PromptPieces:
    """Return prompts with a shared prefix that is as long as the cache hits of the request."""
    stream = source.streams.number("gcommon")
    cached = whole["cached_tokens"].fillna(0).to_numpy(np.int64).copy()
    prompts = whole["prompt_tokens"].to_numpy(np.int64)
    first = int(np.argmax(prompts > cached.max()))
    cached[first] = min(int(cached.max()), int(prompts[first]))
    return PromptPieces.of([[(NAMED_STREAM, stream, 0, n)] if n else [] for n in cached.tolist()])


def _common(rows: RequestRows, share: float, source: TraceSource) -> PromptPieces:
    """Return prompts with a common prefix, which is the fraction ``share`` of all prompt tokens."""
    stream = source.streams.number("gcommon")
    prompts = rows.prompt_tokens
    low, high = 0, int(prompts.max())
    while low < high:
        middle = (low + high) // 2
        if np.minimum(prompts, middle).sum() < share * prompts.sum():
            low = middle + 1
        else:
            high = middle
    return PromptPieces.of(
        [[(NAMED_STREAM, stream, 0, min(int(p), low))] if low else [] for p in prompts]
    )
