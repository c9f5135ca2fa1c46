"""The calendar date that is assigned to a simulated run."""

from __future__ import annotations

from datetime import UTC, datetime

#: Start of a run (time 0) in seconds since 1970: 15 January 2026, 08:00 UTC.
RUN_EPOCH_S = 1768464000.0


def format_time(at: float, form: str) -> str:
    """Return second ``at`` of a run as text in a ``strftime`` format."""
    return datetime.fromtimestamp(RUN_EPOCH_S + at, UTC).strftime(form)
