"""Turns of sessions whose prompts repeat the prompt and the answer of the previous turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simkv.workload.column_values import ColumnArray
from simkv.workload.csv_columns import CsvTable
from simkv.workload.request_columns import (
    OUTPUT_STREAM,
    PROMPT_STREAM,
    PromptPieces,
    RequestRows,
)
from simkv.workload.trace_source import TraceSource

Piece = tuple[int, int, int, int]


def extend_context(pieces: Sequence[Piece], number: int, own: int, output: int) -> list[Piece]:
    """Return the pieces of the context after a call: repeated tokens, new prompt tokens and answer.

    - ``pieces``: tokens that the prompt of the call repeats.
    - ``number``: row of the call.
    - ``own``: number of new prompt tokens.
    - ``output``: number of output tokens.
    """
    prompt = [(PROMPT_STREAM, number, 0, own)] if own else []
    return [*pieces, *prompt, (OUTPUT_STREAM, number, 0, output)]


@dataclass(frozen=True, slots=True)
class _Turn:
    """The last turn of a session that was read: its line, its prompt and answer as pieces, and
    their number of tokens.
    """

    turn: int
    line: int
    pieces: tuple[Piece, ...]
    tokens: int


class GrowingTurns:
    """Prefixes of prompts in sessions, for logs with one row per turn. Each prompt repeats earlier
    turns.

    The rows of a session must be in the order of their turns.
    """

    # Without arrival times, a turn arrives when its think time (default: 0) has passed after the
    # answer of the previous turn.

    def __init__(self, source: TraceSource) -> None:
        self._source = source
        self._last: dict[int, _Turn] = {}

    def extend(self, rows: RequestRows, table: CsvTable, turns: ColumnArray) -> RequestRows:
        """Return the rows with their prefixes. Report rows that do not continue their session.

        ``turns`` contains the turn number of each row.
        """
        where = {int(number): index for index, number in enumerate(table.numbers)}
        fine = np.ones(len(rows), np.bool_)
        pieces: list[tuple[Piece, ...]] = []
        follows = np.zeros(len(rows), np.bool_)
        lengths = zip(rows.prompt_tokens.tolist(), rows.output_tokens.tolist(), strict=True)
        sessions = rows.column("session").tolist()
        for row, (prompt, output) in enumerate(lengths):
            number = int(rows.column("number")[row])
            index = where[number]
            line, turn, session = table.lines[index], int(turns[index]), sessions[row]
            before = self._last.get(session) if session >= 0 else None
            pieces.append(before.pieces if before else ())
            if why := _find_fault(before, turn, prompt):
                self._source.bad(line, *why)
                fine[row] = False
            elif session >= 0:
                follows[row] = before is not None
                own = prompt - (before.tokens if before else 0)
                grown = extend_context(pieces[-1], number, own, output)
                self._last[session] = _Turn(turn, line, tuple(grown), prompt + output)
        rows.pieces = PromptPieces.of(pieces)
        if rows.think_time is None and len(rows) and np.isnan(rows.arrival[0]):
            rows.think_time = np.where(follows, 0.0, np.nan)
        return rows.where(fine)


def _find_fault(before: _Turn | None, turn: int, prompt: int) -> tuple[str, str] | None:
    """Return the invalid column and the reason if a row cannot continue its session, else None."""
    if before is None:
        return None
    if turn <= before.turn:
        return "turn", f"should be above turn {before.turn} of line {before.line}; found {turn}"
    if prompt < before.tokens:
        return (
            "prompt_tokens",
            f"should be at least the {before.tokens} tokens of prompt and answer of the turn "
            f"before, line {before.line}; found {prompt}",
        )
    return None
