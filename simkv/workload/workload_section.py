"""Workloads of a scenario: what the clients send, in one of several forms."""

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
    Sessions,
)
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
#: Fields that say which part of a trace is taken, and how it is replayed.
TRACE_OPTIONS = (
    "format",
    *(field.name for field in fields(Selection)),
    *("request_rate", "burstiness", "max_tokens", "ignore_eos"),
)


def find_other_form_fields(chosen: Container[str]) -> list[str]:
    """The fields of a workload that mean nothing beside the form among ``chosen``, if there is one.

    They go when a scenario's variant, or --set, chooses another form.
    """
    if not any(form in chosen for form in FORMS):
        return []
    others = [*FORMS, *(() if "trace" in chosen else TRACE_OPTIONS)]
    return [name for name in others if name not in chosen]


def _known_format(name: str) -> str:
    if name == "auto":
        return name
    from simkv.workload.formats.format_detection import FORMAT_NAMES  # which imports all formats

    if name not in FORMAT_NAMES:
        raise ValueError(
            f"{name!r} is not known{spelling_hint(name, FORMAT_NAMES)}; expected auto, "
            f"{', '.join(FORMAT_NAMES)}"
        )
    return name


def _part(value: Any) -> str:
    return "fraction" if isinstance(value, float) else "number"


#: A number of requests (1000) or a fraction of them (0.1).
SampleSize = Annotated[
    Annotated[Count, Tag("number")] | Annotated[float, Field(gt=0, le=1), Tag("fraction")],
    Discriminator(_part),
]


class Workload(StrictModel):
    """What the clients send: one of ``requests``, ``burst``, ``arrivals``, ``sessions``, ``trace``.

    ``max_concurrency`` is how many requests the client has in flight at most; the others wait in
    the client. The fields after ``trace`` are for traces only: which part is taken (see Selection),
    and with ``request_rate`` arrivals at that pace in place of the trace's own.
    """

    requests: list[ListedRequest] | None = Field(None, min_length=1)
    """Requests one by one."""
    burst: Burst | None = None
    """Equal requests, in one burst or several."""
    arrivals: Arrivals | None = None
    """Requests drawn from an arrival process and distributions of lengths."""
    sessions: Sessions | None = None
    """Conversations, each turn of which repeats what was said before."""
    acceptance: AcceptanceRates | None = None
    """Share of drafts that the model accepts, where the engine has any: of each draft, if those
    before it were accepted (0.7), or of all by position ([0.8, 0.6, 0.4]); left out, none is."""
    max_concurrency: Count | None = None
    """Most requests in flight; the others wait in the client."""
    trace: Annotated[
        str | None, Field(description="A file or folder beside the scenario, in a known format.")
    ] = None
    format: Annotated[str, AfterValidator(_known_format)] = "auto"
    """Format of the trace; auto finds it."""
    start: Time = 0.0
    """Seconds of the trace that are skipped."""
    duration: FiniteRate | None = None
    """Seconds of it that are taken."""
    rate_scale: FiniteRate = 1.0
    """How many times as fast it is replayed."""
    limit: Count | None = None
    """Most requests taken."""
    sample: SampleSize | None = None
    """A share (0.1) or a number (1000) of its requests, drawn at random."""
    seed: Seed = 0
    """Of that draw, and of arrivals at another pace."""
    skip_bad: bool = False
    """Whether rows that cannot be read are counted and left out."""
    request_rate: Rate | None = None
    """Requests per second in place of the trace's own arrivals; .inf sends all at once."""
    burstiness: Rate = 1.0
    """Shape of the gaps then: 1 is a Poisson process, smaller is burstier."""
    max_tokens: Tokens | None = None
    """What every client asks for, in place of the trace's own."""
    ignore_eos: bool = False
    """Whether clients ask that generation goes on past the end of text."""
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
            raise ValueError(f"exactly one of {', '.join(FORMS)} is needed; found {found}")
        idle = [name for name in TRACE_OPTIONS if name in self.model_fields_set]
        if self.trace is None and idle:
            raise ValueError(f"{', '.join(idle)} here are for a trace; this workload has none")
        if self.trace is not None:
            self._path = find_file(self.trace, info)
        return self

    @property
    def path(self) -> Path:
        """Where the trace lies."""
        return self._path

    @property
    def size(self) -> int:
        """Number of requests. Raises InputError if it takes a trace that cannot be read."""
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
        """The trace, as columns. Raises InputError if it cannot be read."""
        return cached_trace(self._path, self.selection, self.format)

    @property
    def notes(self) -> list[str]:
        """What was left out of a trace and why, and what else its reader must know."""
        return self.loaded.tally.lines() if self.trace is not None else []

    @property
    def selection(self) -> Selection:
        """Which part of the trace is taken."""
        return Selection(**{field.name: getattr(self, field.name) for field in fields(Selection)})


def build_clients(workload: Workload, timeout: float | None) -> Clients:
    """The clients of a workload; ``timeout`` (s) is for requests that do not have their own.

    Raises InputError if it takes a trace that cannot be used.
    """
    requests, after = _requests(workload, timeout)
    return Clients(requests, after, workload.max_concurrency)


def generate_requests(workload: Workload, timeout: float | None) -> list[Request]:
    """The requests of a workload whose arrivals do not depend on how they are served.

    ``timeout`` (s) is for those that do not have their own. Raises InputError if the arrivals do
    depend on it (see ``build_clients``), or if a trace cannot be used.
    """
    requests, after = _requests(workload, timeout)
    if after or workload.max_concurrency is not None:
        raise InputError(
            "workload: max_concurrency, sessions and think times make arrivals depend on how "
            "requests are served; here they must be known before"
        )
    return requests


def _requests(
    workload: Workload, timeout: float | None
) -> tuple[list[Request], dict[int, Dependency]]:
    """The requests, and which of them wait for others."""
    requests, after = _sent(workload, timeout)
    return list(_with_acceptance(workload, requests)), after


def _with_acceptance(workload: Workload, requests: Sequence[Request]) -> Iterable[Request]:
    """The requests with what they do with drafts, as they say themselves or the workload does."""
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
    """What is sent, and which of them wait for others."""
    if workload.requests is not None:
        return _listed(workload.requests, timeout), {}
    if workload.sessions is not None:
        return workload.sessions.requests(timeout)
    if workload.trace is not None:
        return _replayed(workload, timeout)
    form = workload.burst or workload.arrivals
    assert form is not None
    return form.requests(timeout), {}


def _listed(rows: Sequence[ListedRequest], timeout: float | None) -> list[Request]:
    return [
        row.request(
            number,
            row.arrival,
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


def _replayed(
    workload: Workload, timeout: float | None
) -> tuple[list[Request], dict[int, Dependency]]:
    """The requests of a trace, at its own pace or at one that is given."""
    trace = workload.loaded
    arrivals = None
    if workload.request_rate is not None:
        pace = ArrivalProcess(request_rate=workload.request_rate, burstiness=workload.burstiness)
        arrivals = pace.times(make_random_stream(workload.seed, 0), len(trace))
    elif not trace.timed:
        raise InputError(
            f"{trace.path}: has lengths and no arrival times; give workload.request_rate "
            "(.inf: all at once)"
        )
    requests = trace.requests(timeout, arrivals, workload.max_tokens, workload.ignore_eos)
    return requests, trace.after()
