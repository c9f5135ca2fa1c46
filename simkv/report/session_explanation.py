"""Explanation of one session as text: its turns in order, and its time by cause."""

from __future__ import annotations

from collections.abc import Iterator

from simkv.core.figure_registry import format_seconds
from simkv.core.outcome import Outcome
from simkv.explain.ledger_kinds import KIND_LABELS
from simkv.metrics.run_result import RunResult
from simkv.metrics.session_turns import (
    SessionTurn,
    find_critical_path,
    find_start_wait,
    list_sessions,
    list_turns,
)
from simkv.report.run_explanation import format_bars, wrap_text

#: Headings of the table of turns.
_HEADINGS = ("turn", "request", "tools", "think", "arrival", "wait", "run", "end", "prompt")
_COLUMNS = (*_HEADINGS, "cached", "again")
_LEGEND = (
    "Times in s. tools, think: before the request arrives. wait: from its arrival at the client to "
    "its first step. run: from there to its end. cached: prompt tokens from the prefix cache. "
    "again: prompt tokens computed again although an earlier turn had computed them."
)


def explain_session(name: str, result: RunResult, session: int) -> Iterator[str]:
    """Yield the lines that explain a session: a row per turn, and its time by cause.

    ``session`` is the number of the session in order of arrival, from 0.
    """
    record, clients = result.record, result.run.clients
    lives = list_sessions(record, clients)[session]
    turns = list_turns(record, clients, lives)
    finished = sum(life.outcome is Outcome.FINISHED for life in lives)
    last = max((turn.turn for turn in turns), default=0)
    yield from wrap_text(
        f"Session {session} in {name}: {finished} of {len(turns)} requests finished, in {last} "
        f"turn{'s' if last > 1 else ''}; {_lasted(turns)}."
    )
    if wait := find_start_wait(clients, lives):
        yield from wrap_text(
            f"The session waited {format_seconds(wait)} for its start (max_sessions). The times "
            "below do not contain this wait."
        )
    yield ""
    rows = [_row(result, turn) for turn in turns]
    widths = [max(len(row[i]) for row in [_COLUMNS, *rows]) for i in range(len(_COLUMNS))]
    mixed = not all(turn.critical for turn in turns)
    for row, mark in [
        (_COLUMNS, ""),
        *zip(rows, (" *" * turn.critical for turn in turns), strict=True),
    ]:
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{cells}{mark if mixed else ''}".rstrip()
    yield ""
    yield from wrap_text(_LEGEND + (" *: on the critical path." if mixed else ""))
    spent = sum_session_time(result, session)
    if total := sum(spent.values()):
        yield ""
        yield f"Time of this session{' on its critical path' if mixed else ''}: " + (
            format_seconds(total)
        )
        yield from format_bars(spent)


def sum_session_time(result: RunResult, session: int) -> dict[str, float]:
    """Return the time on a session's critical path in seconds, by cause.

    The causes are tool calls, think time, waiting in the client, and the wait intervals of
    requests.
    """
    record, clients = result.record, result.run.clients
    path = find_critical_path(record, clients, list_sessions(record, clients)[session])
    spent = {"tool calls": 0.0, "think time": 0.0, "waiting in the client": 0.0}
    for life in path:
        i = life.request.id
        if dependency := clients.after.get(i):
            spent["tool calls"] += dependency.tool_time
            spent["think time"] += dependency.think_time
        if i in clients.sent:
            spent["waiting in the client"] += clients.queued(i)
        for tile in result.diagnosis.ledger[i]:
            label = KIND_LABELS[tile.kind]
            spent[label] = spent.get(label, 0.0) + tile.seconds
    return {label: seconds for label, seconds in spent.items() if seconds > 0}


def _lasted(turns: list[SessionTurn]) -> str:
    arrived = [turn.arrived for turn in turns if turn.arrived is not None]
    ended = [turn.ended for turn in turns if turn.ended is not None]
    if not arrived or not ended:
        return "it was not sent"
    start, end = min(arrived), max(ended)
    return f"from {start:.3f} s to {end:.3f} s, {format_seconds(end - start)}"


def _row(result: RunResult, turn: SessionTurn) -> tuple[str, ...]:
    """Return the cells of a turn. Times that do not exist are "-"."""
    life = result.record.requests[turn.request]

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    run = None
    if turn.ended is not None and turn.arrived is not None and turn.waited is not None:
        run = turn.ended - turn.arrived - turn.waited
    end = seconds(turn.ended)
    if life.outcome is not Outcome.FINISHED and life.outcome is not None:
        end += f" {life.outcome.word}"
    return (
        str(turn.turn),
        str(turn.request),
        seconds(turn.tool_time) if turn.before else "-",
        seconds(turn.think_time) if turn.before else "-",
        seconds(turn.arrived),
        seconds(turn.waited),
        seconds(run),
        end,
        str(life.request.prompt_tokens),
        str(turn.cached),
        str(turn.recomputed),
    )
