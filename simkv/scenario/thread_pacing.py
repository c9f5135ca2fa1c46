"""Timing of the three threads of FastDeploy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simkv.scenario.base_section import Section

Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


PollInterval = Annotated[float, Field(ge=1e-6, allow_inf_nan=False)]


class Pacing(Section):
    """Timing of FastDeploy's three threads, in seconds.

    The engine sleeps for ``schedule_interval`` after a call that returned no tasks. The engine
    sleeps for ``queue_interval`` while the worker has not taken the last tasks. ``put_gap`` is the
    time from a decision until its tasks are in the worker's queue. ``step_gap`` is the time from
    the message of a step until the worker takes new tasks. ``token_processor_lag`` is the time from
    the end of a step until the token processor receives its message.

    The engine pulls new requests only while ``waiting`` is empty, at most ``max_prefill_num`` and
    at most one per free slot. If ``max_prefill_num`` is null, only the slots limit the number. The
    defaults of the intervals and of ``max_prefill_num`` are FastDeploy's (``common_engine.py``,
    2026-01). The other durations depend on the machine.
    """

    schedule_interval: PollInterval = 0.005
    """Sleep of the engine after a call that returned no tasks (s)."""
    queue_interval: PollInterval = 0.001
    """Sleep of the engine while the worker has not taken the last tasks (s)."""
    put_gap: Delay = 0.0
    """Time from a decision until its tasks are put into the queue (s)."""
    step_gap: Delay = 0.0
    """Time from the end of a step until the worker takes new tasks (s)."""
    token_processor_lag: Delay = 0.0
    """Time from the end of a step until its tokens are received (s)."""
    max_prefill_num: Annotated[int, Field(gt=0)] | None = 3
    """Maximum number of new requests that the engine pulls at once; null pulls all arrived
    requests."""
