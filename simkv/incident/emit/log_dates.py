"""The date on which a simulated run is said to have been."""

from __future__ import annotations

from datetime import UTC, datetime

#: Time 0 of a run, in s since 1970: 15 January 2026, 08:00 UTC.
RUN_EPOCH_S = 1768464000.0


def format_time(at: float, form: str) -> str:
    """Second ``at`` of a run in a form of ``strftime``."""
    return datetime.fromtimestamp(RUN_EPOCH_S + at, UTC).strftime(form)
