"""Timing of the three threads of FastDeploy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simkv.scenario.base_section import Section

Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


PollInterval = Annotated[float, Field(ge=1e-6, allow_inf_nan=False)]


class Pacing(Section):
    """Timing of the three threads in seconds, and the number of requests pulled at once.

    Engine: it sleeps for ``schedule_interval`` after a call that returned no tasks, and repeatedly
    for ``queue_interval`` while the worker has not taken the last tasks. ``put_gap`` passes between
    a decision and its put, while the tasks are serialised. Worker: ``step_gap`` passes between the
    message of a step and the next point at which tasks are taken. Token processor: it receives a
    message ``token_processor_lag`` after the end of the step.

    The engine pulls new requests only while ``waiting`` is empty, at most ``max_prefill_num`` and
    at most one per free slot; with null it pulls all arrived requests. The defaults of the two
    intervals and of this limit are FastDeploy's (``common_engine.py``, 2026-01). The other
    durations depend on the machine.
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
    """Maximum number of new requests pulled at once; null for all arrived requests."""
