"""How the three threads of FastDeploy keep time."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simkv.scenario.base_section import Section

Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


PollInterval = Annotated[float, Field(ge=1e-6, allow_inf_nan=False)]


class Pacing(Section):
    """How the three threads keep time, in seconds, and how many requests the engine takes at once.

    Engine: it sleeps ``schedule_interval`` after a call that gave no tasks, and ``queue_interval``
    again and again while the worker has not taken the last ones; ``put_gap`` passes from a decision
    to its put, when the tasks are serialised. Worker: ``step_gap`` passes from the message of a
    step to the next border, where tasks are taken. Token processor: a message is heard
    ``token_processor_lag`` after the end of its step.

    The engine pulls new requests only while ``waiting`` is empty, then at most ``max_prefill_num``
    and no more than slots are free; with null it takes all that have come. The defaults of the two
    intervals and of this limit are FastDeploy's (``common_engine.py``, 2026-01). How long the rest
    takes depends on the machine.
    """

    schedule_interval: PollInterval = 0.005
    """Seconds that the engine sleeps after a call that gave no tasks."""
    queue_interval: PollInterval = 0.001
    """Seconds that it sleeps while the worker has not taken the last tasks."""
    put_gap: Delay = 0.0
    """Seconds from a decision until its tasks are put into the queue."""
    step_gap: Delay = 0.0
    """Seconds from the end of a step until the worker takes new tasks."""
    token_processor_lag: Delay = 0.0
    """Seconds from the end of a step until its tokens are heard."""
    max_prefill_num: Annotated[int, Field(gt=0)] | None = 3
    """Most new requests that are pulled at a time; null takes all that have come."""
