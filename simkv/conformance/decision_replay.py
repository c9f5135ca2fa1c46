"""Replay recorded decisions of real engines through simkv's schedulers and compare every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simkv.conformance import per_decision_replay, tick_replay
from simkv.conformance.decision_trace import (
    RECORDER_LIMIT,
    DecisionTrace,
    TraceError,
    ending_kind,
    relative_times,
)
from simkv.core.engine_spec import EngineSpec
from simkv.core.recording_format import RecordingLine
from simkv.schedulers.engine_registry import ENGINES

ENDED = "all requests ended"


@dataclass(frozen=True)
class Mismatch:
    """The first step at which simkv differs from a recording.

    ``recorded`` and ``simulated`` map the differing fields to their values. ``step`` is "end" if
    only the ends of the runs differ.
    """

    step: str
    recorded: RecordingLine
    simulated: RecordingLine


@dataclass(frozen=True)
class Conformance:
    """Result of replaying one recording; ``difference`` is None if simkv reproduces the recording.

    ``steps`` is the number of equal steps. ``assumed`` describes an unconfirmed assumption on the
    engine's release, or is None.
    """

    name: str
    engine: str
    variant: str
    steps: int
    difference: Mismatch | None
    assumed: str | None = None


def check_trace(trace: DecisionTrace) -> Conformance:
    """Replay a recording and compare every field of every recorded line with the simulated line.

    Raises TraceError if this version of simkv cannot replay the recording.
    """
    engine = ENGINES.get(trace.header["engine"])
    if engine is None:
        raise TraceError(
            f"{trace.where}: engine: unknown engine {trace.header['engine']!r}; expected one of "
            f"{', '.join(sorted(ENGINES))}"
        )
    assumed = _assumed(engine, trace)
    try:
        count, difference = compare(trace, replay_decisions(engine, trace.header, len(trace.steps)))
    except Exception as error:  # the header may contain invalid values of any kind
        raise TraceError(f"{trace.where}: header: cannot be replayed: {error!r}") from error
    return Conformance(trace.name, engine.name, trace.header["variant"], count, difference, assumed)


def _assumed(engine: EngineSpec, trace: DecisionTrace) -> str | None:
    """Return an unconfirmed assumption about the variant of a recording, or None.

    Raises TraceError for an unknown variant. Variants such as ``v1-async`` or ``lpm``, which are
    named after a configuration instead of a release, are accepted.
    """
    header, release = trace.header["variant"], trace.header["config"].get("variant")
    if release not in (None, header):
        why = f"variant: {header!r} differs from {release!r} in config"
        raise TraceError(f"{trace.where}: {why}")
    name = header.removesuffix("_wtinf")
    has_releases = any(known[0].isdigit() for known in engine.variants)
    if release is None and has_releases and not name[:1].isdigit():
        return None
    try:
        engine.variant(name)
    except KeyError:
        known = ", ".join(engine.variants)
        why = f"variant: unknown variant {name!r}; expected one of {known}"
        raise TraceError(f"{trace.where}: {why}") from None
    except ValueError as error:
        raise TraceError(f"{trace.where}: variant: {error}") from error
    return engine.naming.assumed(name)


def replay_decisions(
    engine: EngineSpec, header: RecordingLine, at_least: int
) -> Iterator[RecordingLine]:
    """Yield one line for each decision of simkv's scheduler on the workload of ``header``.

    The lines have the format of the engine's recordings. A last line with ``"truncated": True``
    follows if the engine dies, or if its state repeats after at least ``at_least`` lines.
    """
    if engine.recording.ticks and "delays" in header:
        return tick_replay.replay_ticks(engine, header, at_least)
    return per_decision_replay.replay_steps(engine, header, at_least)


def compare(
    trace: DecisionTrace, simulated: Iterator[RecordingLine]
) -> tuple[int, Mismatch | None]:
    """Compare every recorded field and the end of a recording with simulated lines.

    Returns the number of equal lines at the beginning, and the first difference or None.
    """
    for count, line in enumerate(trace.steps):
        ours = next(simulated, {})
        missed = {k: v for k, v in line.items() if k not in ours or ours[k] != v}
        if missed:
            step = str(line.get("step", line.get("tick")))
            return count, Mismatch(step, missed, {k: ours.get(k) for k in missed})
    return len(trace.steps), _compare_ends(trace, simulated)


def _compare_ends(trace: DecisionTrace, simulated: Iterator[RecordingLine]) -> Mismatch | None:
    """Return the difference between the ends of the two runs, or None.

    simkv's run must end after the last recorded step. If the recording is truncated, simkv's run
    must stop for the same kind of reason.
    """
    truncated = trace.truncated
    recorded = {"ending": ending_kind(truncated) if truncated else ENDED}
    for ours in simulated:
        if truncated and not ours.get("truncated"):
            continue
        if truncated and recorded["ending"] == RECORDER_LIMIT and _goes_round(trace.steps, ours):
            return None
        if truncated and ours["ending"] == recorded["ending"]:
            return None
        return Mismatch("end", recorded, ours)
    return Mismatch("end", recorded, {"ending": ENDED}) if truncated else None


def _goes_round(steps: list[RecordingLine], ours: RecordingLine) -> bool:
    """Return whether the recorded steps repeat periodically after the step at which simkv detected
    a cycle.
    """
    proved = ours.get("proved")
    if proved is None or proved >= len(steps):
        return False
    lines = [relative_times(line) for line in steps]
    return any(
        all(lines[at] == lines[at - period] for at in range(proved, len(lines)))
        for period in range(1, proved + 1)
    )
