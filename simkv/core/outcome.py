"""How a request can end."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended: exactly one of these."""

    FINISHED = "finished"
    STARVED = "starved"  # the client gave up
    REJECTED = "rejected"  # the engine said no
    LOST = "lost"  # the engine forgot it
    STALLED = "stalled"  # it can never finish, or the engine died
    CUT_OFF = "cut_off"  # the horizon came first
