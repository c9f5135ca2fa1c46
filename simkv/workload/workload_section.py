"""The ``workload`` section of a scenario: the requests that clients send, in several forms."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from simkv.core.errors import InputError, spelling_hint
from simkv.core.request import Request
from simkv.workload.clients import Clients, Dependency
from simkv.workload.generated_requests import (
    ArrivalProcess,
    Arrivals,
    FiniteRate,
    Rate,
)
from simkv.workload.generated_sessions import Sessions
from simkv.workload.listed_requests import Burst, ListedRequest, make_acceptance
from simkv.workload.trace_reader import Trace, cached_trace
from simkv.workload.trace_selection import Selection
from simkv.workload.workload_base import (
    MAX_REQUEST_COUNT,
    AcceptanceRates,
    Count,
    Seed,
    StrictModel,
    Time,
    Tokens,
    find_file,
    make_random_stream,
)

FORMS = ("requests", "burst", "arrivals", "sessions", "trace")
#: Fields that select a part of a trace and control its replay.
TRACE_OPTIONS = (
    "format",
    *(field.name for field in fields(Selection)),
    *("request_rate", "burstiness", "max_tokens", "ignore_eos"),
)


def find_other_form_fields(chosen: Container[str]) -> list[str]:
    """Return the workload fields that do not apply to the form in ``chosen``, such as ``trace``.

    The form is the kind of workload.
    """
    # A scenario variant or ``--set`` removes these fields when it selects another form. The result
    # is empty if ``chosen`` contains no form.
    if not any(form in chosen for form in FORMS):
        return []
    others = [*FORMS, *(() if "trace" in chosen else TRACE_OPTIONS)]
    return [name for name in others if name not in chosen]


def _known_format(name: str) -> str:
    if name == "auto":
        return name
    # imported here because it imports all formats
    from simkv.workload.formats.format_detection import FORMAT_NAMES

    if name not in FORMAT_NAMES:
        raise ValueError(
            f"unknown format {name!r}{spelling_hint(name, FORMAT_NAMES)}; expected auto, "
            f"{', '.join(FORMAT_NAMES)}"
        )
    return name


def _part(value: Any) -> str:
    return "fraction" if isinstance(value, float) else "number"


#: Number of requests (1000), or a fraction of the requests (0.1).
SampleSize = Annotated[
    Annotated[Count, Tag("number")] | Annotated[float, Field(gt=0, le=1), Tag("fraction")],
    Discriminator(_part),
]


class Workload(StrictModel):
    """Requests that clients send, in exactly one form.

    The forms are ``requests``, ``burst``, ``arrivals``, ``sessions`` and ``trace``. The fields
    after ``trace`` apply to traces only.
    """

    requests: list[ListedRequest] | None = Field(None, min_length=1)
    """List of single requests."""
    burst: Burst | None = None
    """Identical requests in one or more bursts."""
    arrivals: Arrivals | None = None
    """Requests sampled from an arrival process and length distributions."""
    sessions: Sessions | None = None
    """Conversations in which each turn repeats the previous turns."""
    acceptance: AcceptanceRates | None = None
    """Acceptance rate of draft tokens in speculative decoding: the probability that a draft token
    is accepted if all earlier draft tokens were accepted (0.7), or one probability per position
    ([0.8, 0.6, 0.4]). Default: no draft token is accepted."""
    max_concurrency: Count | None = None
    """Maximum number of requests in flight; further requests wait in the client."""
    max_sessions: Count | None = None
    """Maximum number of sessions in progress; further sessions start when others end. The figures
    of sessions do not contain the wait for this start, except ``start_wait_ms``."""
    session_deadline: FiniteRate | None = None
    """Time limit in seconds from the start of a session to its last answer. Sessions that
    exceed it are counted in ``sessions`` of ``summary.json``; they are not cancelled."""
    warm_up_sessions: Annotated[int, Field(ge=0, le=MAX_REQUEST_COUNT)] = 0
    """Number of warm-up sessions. The sessions that arrive first are simulated, but excluded from
    ``sessions`` of ``summary.json``."""
    trace: Annotated[
        str | None,
        Field(description="File or folder in a supported format, relative to the scenario file."),
    ] = None
    format: Annotated[str, AfterValidator(_known_format)] = "auto"
    """Format of the trace; ``auto`` detects it."""
    start: Time = 0.0
    """Seconds to skip at the beginning of the trace."""
    duration: FiniteRate | None = None
    """Length in seconds of the part of the trace to replay."""
    rate_scale: FiniteRate = 1.0
    """Factor that multiplies the request rate of the trace."""
    limit: Count | None = None
    """Maximum number of requests."""
    sample: SampleSize | None = None
    """Random sample of the requests: a fraction (0.1) or a number (1000)."""
    seed: Seed = 0
    """Random seed for the sample, and for the arrivals if ``request_rate`` is set."""
    skip_bad: bool = False
    """Whether to skip rows that cannot be read, and report their number; otherwise, such a row is
    an error."""
    request_rate: Rate | None = None
    """Requests per second, in place of the arrival times of the trace; .inf sends all requests at
    once."""
    burstiness: Rate = 1.0
    """Burstiness of arrivals at ``request_rate``: 1 is a Poisson process, smaller values are
    burstier."""
    max_tokens: Tokens | None = None
    """``max_tokens`` of every request, in place of the value in the trace."""
    ignore_eos: bool = False
    """Whether clients ask to continue generation past the end-of-sequence token."""
    _path: Path = PrivateAttr(default_factory=Path)

    @field_validator("trace")
    @classmethod
    def _there(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None:
            find_file(name, info)
        return name

    @model_validator(mode="after")
    def _one_form(self, info: ValidationInfo) -> Self:
        given = [form for form in FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"must have exactly one of {', '.join(FORMS)}; found {found}")
        idle = [name for name in TRACE_OPTIONS if name in self.model_fields_set]
        if self.trace is None and idle:
            raise ValueError(
                f"{', '.join(idle)}: only allowed with a trace; this workload has none"
            )
        if self.trace is not None:
            self._path = find_file(self.trace, info)
        return self

    @model_validator(mode="after")
    def _waits_for_earlier(self) -> Self:
        for number, row in enumerate(self.requests or ()):
            if row.wait_for is not None and max(row.wait_for) >= number:
                raise ValueError(
                    f"requests[{number}].wait_for: must be numbers of earlier requests, below "
                    f"{number}; found {max(row.wait_for)}"
                )
        return self

    @property
    def path(self) -> Path:
        """Path of the trace."""
        return self._path

    @property
    def size(self) -> int:
        """Number of requests. Raises InputError if the trace cannot be read."""
        if self.requests is not None:
            return len(self.requests)
        if self.arrivals is not None:
            return self.arrivals.num_prompts
        if self.trace is not None:
            return len(self.loaded)
        counted = self.burst or self.sessions
        return counted.size if counted else 0

    @property
    def loaded(self) -> Trace:
        """Trace as columns. Raises InputError if it cannot be read."""
        return cached_trace(self._path, self.selection, self.format)

    @property
    def notes(self) -> list[str]:
        """Notes about the trace, such as the number of rows left out."""
        return self.loaded.tally.lines() if self.trace is not None else []

    @property
    def selection(self) -> Selection:
        """Selected part of the trace."""
        return Selection(**{field.name: getattr(self, field.name) for field in fields(Selection)})


def build_clients(workload: Workload, timeout: float | None) -> Clients:
    """Build the clients of a workload.

    ``timeout`` (s) applies to requests without their own timeout. Raises InputError if the trace
    cannot be used.
    """
    requests, after = _requests(workload, timeout)
    return Clients(requests, after, workload.max_concurrency, workload.max_sessions)


def generate_requests(workload: Workload, timeout: float | None) -> list[Request]:
    """Return the requests of a workload with fixed arrival times.

    ``timeout`` (s) applies to requests without their own timeout. Raises InputError if arrivals
    depend on answers, or if the trace cannot be used.
    """
    requests, after = _requests(workload, timeout)
    if after or workload.max_concurrency or workload.max_sessions:
        raise InputError(
            "workload: this feature requires arrival times that are known before the run; with "
            "max_concurrency, max_sessions, sessions or think times, arrival times depend on "
            "the simulation"
        )
    return requests


def _requests(
    workload: Workload, timeout: float | None
) -> tuple[list[Request], dict[int, Dependency]]:
    """Return the requests and the dependencies between them."""
    # The requests have acceptance rates of draft tokens.
    requests, after = _sent(workload, timeout)
    return list(_with_acceptance(workload, requests)), after


def _with_acceptance(workload: Workload, requests: Sequence[Request]) -> Iterable[Request]:
    """Return the requests with acceptance rates of draft tokens."""
    # The rates come from the request, the trace or the workload.
    column = workload.loaded.rows.acceptance if workload.trace is not None else None
    if workload.acceptance is None and column is None:
        return requests
    form = workload.arrivals or workload.sessions or workload
    own = [None] * len(requests) if column is None else column.tolist()
    return (
        request
        if request.acceptance
        else replace(
            request,
            acceptance=make_acceptance(
                workload.acceptance if rate is None or rate != rate else rate,
                form.seed * MAX_REQUEST_COUNT + request.id,
            ),
        )
        for request, rate in zip(requests, own, strict=True)
    )


def _sent(workload: Workload, timeout: float | None) -> tuple[list[Request], dict[int, Dependency]]:
    """Return the requests and the dependencies between them."""
    if workload.requests is not None:
        return _listed(workload.requests, timeout)
    if workload.sessions is not None:
        return workload.sessions.requests(timeout)
    if workload.trace is not None:
        return _replayed(workload, timeout)
    form = workload.burst or workload.arrivals
    assert form is not None
    return form.requests(timeout), {}


def _listed(
    rows: Sequence[ListedRequest], timeout: float | None
) -> tuple[list[Request], dict[int, Dependency]]:
    """Return the requests of a list and the dependencies between them."""
    after: dict[int, Dependency] = {}
    arrivals: list[float] = []
    for number, row in enumerate(rows):
        arrival = row.arrival
        if row.wait_for is not None:
            before = tuple(dict.fromkeys(row.wait_for))
            after[number] = Dependency(before, row.think_time, row.tool_time, row.first_wins)
            # the earliest possible time, if answers took no time
            arrival = max(arrivals[one] for one in before) + after[number].delay
        arrivals.append(arrival)
    requests = [
        row.request(
            number,
            arrivals[number],
            row.prompt_tokens,
            row.output_tokens,
            row.timeout or timeout,
            row.prompt,
            acceptance=make_acceptance(
                row.acceptance,
                number if row.acceptance_seed is None else row.acceptance_seed,
            ),
        )
        for number, row in enumerate(rows)
    ]
    return requests, after


def _replayed(
    workload: Workload, timeout: float | None
) -> tuple[list[Request], dict[int, Dependency]]:
    """Return the requests of a trace, with the trace's arrival times or at the configured rate."""
    trace = workload.loaded
    arrivals = None
    if workload.request_rate is not None:
        pace = ArrivalProcess(request_rate=workload.request_rate, burstiness=workload.burstiness)
        arrivals = pace.times(make_random_stream(workload.seed, 0), len(trace))
    elif not trace.timed:
        raise InputError(
            f"{trace.path}: contains no arrival times; set workload.request_rate "
            "(.inf: all at once)"
        )
    requests = trace.requests(timeout, arrivals, workload.max_tokens, workload.ignore_eos)
    return requests, trace.after()
