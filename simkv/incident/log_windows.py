"""Convert a server's statistics lines to time intervals, with their work and the state at their
end.

vLLM writes a line every 10 s (``VLLM_LOG_STATS_INTERVAL``) with the rates since the previous line,
and writes no lines while idle. SGLang writes one line per prefill batch, with its requests and
tokens, and one line per N decode batches. SGLang's lines are grouped into intervals of a few
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]
#: Interval assumed for vLLM if a log has only one line (s), and minimum length of intervals for
#: SGLang's lines (s).
VLLM_INTERVAL_S, MIN_WINDOW_S = 10.0, 2.0
#: Maximum number of intervals for SGLang's lines, and the time for which such a line remains valid
#: (s).
MAX_WINDOWS, LINE_VALIDITY_S = 2000, 15.0
#: Minimum ratio of the output rate in the first interval to the rate in later intervals; with a
#: higher ratio, requests are assumed to run already when the log begins.
STEADY_SHARE = 0.4
#: Columns that iteration lines lack; their values are taken from the statistics lines around an
#: iteration.
_BETWEEN = ("waiting", "usage")


@dataclass(frozen=True)
class LogWindows:
    """Successive time intervals. Each ends at ``end`` (s) and has the length ``width`` (s).

    ``prompt`` and ``output`` are the numbers of tokens computed in an interval. ``running`` and
    ``waiting`` (requests) and ``held`` (tokens in the KV cache) are the state at the end of the
    interval. ``firsts`` is the number of requests prefilled in the interval. ``hit_rate`` is the
    logged prefix-cache hit rate. Unknown values are NaN. ``initial_running`` and
    ``initial_waiting`` are the numbers of requests at the start of the first interval.
    """

    end: Floats
    width: Floats
    prompt: Floats
    output: Floats
    running: Floats
    waiting: Floats
    held: Floats
    firsts: Floats
    hit_rate: Floats
    initial_running: int = 0
    initial_waiting: int = 0

    @property
    def begin(self) -> Floats:
        """Start of each interval in seconds."""
        return self.end - self.width


def can_build_windows(series: pd.DataFrame | None) -> bool:
    """Return whether the log lines report the numbers of computed tokens."""
    if series is None or not len(series):
        return False
    counted = "prompts" in series and series["prompts"].fillna(0).sum() > 0
    return counted or bool((series["prompt_rate"].fillna(0) > 0).any())


def build_windows(series: pd.DataFrame, tokens: float) -> LogWindows:
    """Return the time intervals of one engine.

    ``tokens`` is the capacity of the KV cache in tokens (NaN if unknown).
    """
    lines = series.sort_values("t_s", kind="stable")
    if "prompts" in lines and lines["prompts"].notna().any():
        return _of_batches(lines, tokens)
    return _of_rates(lines.drop_duplicates("t_s", keep="last"), tokens)


def with_initial_state(cut: LogWindows) -> LogWindows:
    """Return the time intervals with the number of requests at the start of the log.

    The numbers in the first line are assumed to apply at the start.
    """
    pairs = (cut.running > 0) & (cut.output > 0)
    if not pairs.any() or cut.running[0] <= 0:
        return cut
    each = float(np.median((cut.output / cut.width)[pairs] / cut.running[pairs]))
    if cut.output[0] / cut.width[0] < STEADY_SHARE * each * cut.running[0]:
        return cut
    waiting = int(np.nan_to_num(cut.waiting[0]))
    return replace(cut, initial_running=int(cut.running[0]), initial_waiting=waiting)


def series_from_steps(steps: pd.DataFrame, series: pd.DataFrame, budget: int) -> pd.DataFrame:
    """Return a table of statistics lines built from logged iterations.

    Waiting requests are interpolated between the real statistics lines. A prompt is assumed to
    continue in the next step if its step uses the whole ``budget`` of tokens.
    """
    found = []
    for engine, lines in split_by_engine(series).items():
        mine = steps[steps["engine"] == max(engine, 0)]
        known = {name: np.interp(mine["t_s"], lines["t_s"], lines[name]) for name in _BETWEEN}
        full = mine["prefill_tokens"] + mine["decode_tokens"] >= budget
        went_on = full.shift(fill_value=False)
        begun = np.maximum((mine["prefill_seqs"] - went_on).to_numpy(np.float64), 0.0)
        new = begun - _again(begun, mine["t_s"].to_numpy(np.float64), lines)
        whole = mine["prefill_tokens"] * np.where(begun > 0, new / np.maximum(begun, 1), 1.0)
        found.append(
            pd.DataFrame(
                {
                    "t_s": mine["t_s"],
                    "engine": engine,
                    "running": mine["prefill_seqs"] + mine["decode_seqs"],
                    "waiting": np.rint(known["waiting"]),
                    "usage": mine["usage"].fillna(pd.Series(known["usage"], mine.index)),
                    "prefills": new,
                    "prompts": whole,
                    "outputs": mine["decode_tokens"] + begun,
                }
            )
        )
    return pd.concat(found, ignore_index=True)


def _again(begun: Floats, at: Floats, lines: pd.DataFrame) -> Floats:
    """Return the number of prefills in each step that repeat the prefill of a preempted request.

    If a line reports N preemptions, the first N prefills since the previous line are assumed to be
    repetitions.
    """
    found = np.zeros(len(begun))
    taken = lines[lines["preemptions"] > 0]
    for end, left in zip(taken["t_s"].tolist(), taken["preemptions"].tolist(), strict=True):
        for place in np.flatnonzero((at > end - VLLM_INTERVAL_S) & (begun > found)).tolist():
            again = min(left, begun[place] - found[place])
            found[place] += again
            left -= again
            if left <= 0:
                break
    return found


def split_by_engine(series: pd.DataFrame) -> Mapping[int, pd.DataFrame]:
    """Return the statistics lines by number of the engine."""
    numbers = series["engine"].unique().tolist()
    return {int(number): series[series["engine"] == number] for number in numbers}


def _of_rates(lines: pd.DataFrame, tokens: float) -> LogWindows:
    end = lines["t_s"].to_numpy(np.float64)
    gaps = np.diff(end)
    every = float(np.median(gaps)) if len(gaps) else VLLM_INTERVAL_S
    # Times in lines are whole seconds; a line after an idle period covers one interval, like any
    # other line.
    width = np.full(len(end), every)
    if len(gaps):
        near = np.abs(gaps - every) <= 0.5 * every
        width[1:] = np.where(near & (np.abs(gaps - every) > 1.0), gaps, every)
    known = {name: lines[name].to_numpy(np.float64) for name in ("running", "waiting", "usage")}
    return LogWindows(
        end,
        width,
        np.nan_to_num(lines["prompt_rate"].to_numpy(np.float64)) * width,
        np.nan_to_num(lines["output_rate"].to_numpy(np.float64)) * width,
        known["running"],
        known["waiting"],
        _held(known["usage"], known["running"], tokens),
        np.full(len(end), np.nan),
        lines["hit_rate"].to_numpy(np.float64)
        if "hit_rate" in lines
        else np.full(len(end), np.nan),
    )


def _held(usage: Floats, running: Floats, tokens: float) -> Floats:
    """Return the number of tokens in the KV cache, or NaN if the usage is not logged."""
    if not (usage[running > 0] > 0).any():
        return np.full(len(usage), np.nan)
    return np.asarray(usage * tokens)


def _of_batches(lines: pd.DataFrame, tokens: float) -> LogWindows:
    at = lines["t_s"].to_numpy(np.float64)
    span = max(float(at[-1] - at[0]), MIN_WINDOW_S)
    every = max(MIN_WINDOW_S, span / MAX_WINDOWS)
    edges = at[0] - 0.5 + every * np.arange(int(np.ceil((span + 1) / every)) + 1)
    end = edges[1:]
    place = np.clip(np.searchsorted(edges, at, "left") - 1, 0, len(end) - 1)

    def summed(name: str) -> Floats:
        values = np.nan_to_num(lines[name].to_numpy(np.float64))
        return np.asarray(np.bincount(place, values, len(end)), np.float64)

    last = np.searchsorted(at, end, "right") - 1
    fresh = (last >= 0) & (end - at[np.maximum(last, 0)] <= LINE_VALIDITY_S)

    def there(name: str) -> Floats:
        values = lines[name].ffill().fillna(0.0).to_numpy(np.float64)
        return np.where(fresh, values[np.maximum(last, 0)], 0.0)

    return LogWindows(
        end,
        np.full(len(end), every),
        _begun_in(summed("prompts"), summed("prefills")),
        summed("outputs") if "outputs" in lines else _decoded(lines, edges),
        there("running"),
        there("waiting"),
        _held(there("usage"), there("running"), tokens),
        summed("prefills"),
        np.full(len(end), np.nan),
    )


def _begun_in(prompts: Floats, begun: Floats) -> Floats:
    """Return the number of prompt tokens of each interval. A prompt counts where its prefill
    began.
    """
    place = np.maximum.accumulate(np.where(begun > 0, np.arange(len(begun)), 0))
    return np.asarray(np.bincount(place, prompts, len(begun)), np.float64)


def _decoded(lines: pd.DataFrame, edges: Floats) -> Floats:
    """Return the number of decoded tokens per interval. A rate covers the time since the previous
    line.
    """
    decodes = lines.dropna(subset=["output_rate"])
    if not len(decodes):
        return np.zeros(len(edges) - 1)
    at = decodes["t_s"].to_numpy(np.float64)
    before = np.concatenate([[edges[0]], at[:-1]])
    emitted = decodes["output_rate"].to_numpy(np.float64) * np.maximum(at - before, 1e-3)
    grown = np.concatenate([[0.0], np.cumsum(emitted)])
    return np.diff(np.interp(edges, np.concatenate([[edges[0]], at]), grown))
