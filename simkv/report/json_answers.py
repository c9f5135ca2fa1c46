"""Answers of commands as JSON (``--json``): one model per command, which defines its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from simkv.core.version import __version__

if TYPE_CHECKING:
    from simkv.metrics.expectation_checks import ExpectationCheck
    from simkv.metrics.run_result import RunResult
    from simkv.report.run_diff import RunDiff
    from simkv.study.change_check import ChangeCheck


def _finite(value: Any) -> Any:
    """Replace infinite numbers and NaN by None, because JSON does not have them."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


#: A number, or null if it is unknown or infinite.
Number = Annotated[float | int | None, BeforeValidator(_finite)]
#: Values by metric name; the reference pages of the documentation list the names.
Values = Annotated[dict[str, Any], BeforeValidator(_finite)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Answer(_Part):
    """Fields of every answer."""

    version: Annotated[str, Field(description="Version of simkv.")] = __version__


class VerdictText(_Part):
    """A problem that was found in a run."""

    name: str
    text: str = Field(description="Evidence for the verdict, in sentences.")
    requests: list[int] = Field(description="Ids of the affected requests.")


class Expectation(_Part):
    """A checked expectation of the scenario."""

    variant: str
    text: str
    ok: bool


class RunVariant(_Part):
    """Result of one variant."""

    verdict: str = Field(description="How the run ended, such as served or starved.")
    verdicts: list[VerdictText]
    summary: Values = Field(description="Metrics of the variant, as in summary.json.")


class RunAnswer(Answer):
    """Answer of ``simkv run``."""

    scenario: str
    answer: dict[str, str] = Field(
        description="The printed lines: Result, Affected, Cause, Fix, Confidence."
    )
    variants: dict[str, RunVariant]
    expectations: list[Expectation]
    folder: str = Field(description="Directory of the results.")
    files: list[str]


class WaitInterval(_Part):
    """An interval of a request's time that has one cause."""

    what: str
    words: str
    start_s: Number
    seconds: Number


class BlockingRequest(_Part):
    """A request that held blocks or a slot for which another request waited."""

    request: int
    seconds: Number


class ExplainedRequest(_Part):
    """The times, intervals and blockers of one request."""

    request: int
    outcome: str | None
    arrival_s: Number
    e2e_s: Number = Field(description="Null if there is no answer.")
    lasted_s: Number
    intervals: list[WaitInterval]
    blockers: list[BlockingRequest]


class ExplainedTurn(_Part):
    """A request of a session. Times that do not exist are null."""

    request: int
    turn: int = Field(
        description="One more than the highest turn that it waited for; 1 if it waited for none."
    )
    before: list[int] = Field(description="Ids of the requests whose answers it waited for.")
    tool_s: Number
    think_s: Number
    arrival_s: Number = Field(
        description="Time at which it reached its client, or at which max_sessions started it."
    )
    waited_s: Number = Field(description="Time from arrival_s to its first step.")
    end_s: Number
    outcome: str | None
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int = Field(
        description="Prompt tokens that an earlier turn had computed and that were computed again."
    )
    critical: bool = Field(
        description="Whether the request is on the critical path of its session."
    )


class ExplainedSession(_Part):
    """The turns of one session in order of arrival."""

    session: int
    start_wait_s: Number = Field(
        description="Time that it waited for its start because of max_sessions; null if it did not "
        "start."
    )
    turns: list[ExplainedTurn]
    critical_seconds: Mapping[str, Number] = Field(
        description="Time on the critical path by kind, in s."
    )


class ExplainedVariant(_Part):
    """Explanation of one variant."""

    verdict: str
    verdict_detail: str
    verdicts: list[VerdictText]
    seconds_by_kind: dict[str, Number] = Field(
        description="Total time of all requests in seconds, by kind of interval."
    )
    request: Annotated[
        ExplainedRequest | None, Field(description="The explained request, if one was given.")
    ] = None
    session: Annotated[
        ExplainedSession | None, Field(description="The explained session, if one was given.")
    ] = None


class ExplainAnswer(Answer):
    """Answer of ``simkv explain``."""

    variants: dict[str, ExplainedVariant]


class PlanAnswer(Answer):
    """Answer of ``simkv plan``: one plan per variant and combination, as in plan.json.

    With ``--tune``, ``plans`` is empty. ``deployments`` contains the simulated deployments, and
    ``best`` the name of the best deployment for each criterion.
    """

    plans: list[Values]
    deployments: list[Values] = []
    best: dict[str, str] = {}
    launch_commands: list[str]
    folder: str


class SweepAnswer(Answer):
    """Answer of ``simkv sweep``: the rows of table.csv."""

    scenario: str
    rows: list[Values]
    folder: str


class FigureChangeAnswer(_Part):
    """Change of a metric, relative to its value before the change."""

    name: str
    before: Number
    after: Number
    change: Number
    low: Number
    high: Number
    beyond_tolerance: bool


class CompareAnswer(Answer):
    """Answer of ``simkv compare``."""

    requests: int
    seeds: int
    with_errors: bool = Field(description="Whether the ranges include the error of step times.")
    tolerance: float
    figures: list[FigureChangeAnswer]
    worse: list[Values] = Field(description="Requests that become worse, most affected first.")
    better: list[Values]
    ok: bool = Field(
        description="True if no metric worsens by more than the tolerance in its whole range."
    )


class DiffAnswer(Answer):
    """Answer of ``simkv diff``."""

    same: bool
    only: list[str] = Field(description="Variants that exist in only one of the runs.")
    variants: list[Values]


class IncidentChecks(_Part):
    """Checks of one packaged incident."""

    name: str
    ok: bool
    expectations: list[Expectation]


class ZooAnswer(Answer):
    """Answer of ``simkv zoo``."""

    incidents: list[IncidentChecks]
    ok: bool
    comparisons: list[Values] = Field(
        default=[],
        description="With --source: results of each variant with the newest release and with the "
        "source.",
    )


class BlocksAnswer(Answer):
    """Answer of ``simkv blocks``."""

    settings: Values = Field(description="Settings of the engine, both given and computed.")
    memory_bytes: Mapping[str, Number] = Field(description="GPU memory by use.")
    refusal: str = Field(
        description="Reason why the server would refuse to start; empty if it would start."
    )


class ConformedTrace(_Part):
    """Comparison with one recording."""

    name: str
    engine: str
    variant: str
    steps: int
    equal: bool
    difference: Values | None = Field(description="The first step that differs.")


class ConformAnswer(Answer):
    """Answer of ``simkv conform``."""

    traces: list[ConformedTrace]
    unreadable: list[str]
    equal: int
    total: int


class Policy(_Part):
    """A simulated version of an engine."""

    engine: str
    variant: str
    summary: str
    source: str
    recorded: int = Field(description="Number of recordings of the real code.")
    equal: int = Field(description="Number of recordings that the simulation reproduces.")


class PoliciesAnswer(Answer):
    """Answer of ``simkv policies``."""

    policies: list[Policy]


class ProfileRow(_Part):
    """Packaged step costs of a model on a GPU."""

    name: str | None = Field(
        description="Name of the packaged profile; null if step costs are computed from hardware."
    )
    model: str
    gpu: str
    fits: int | None = Field(description="Smallest number of GPUs, if known.")
    basis: str
    error: str
    hardware: dict[str, Any] | None = Field(
        description="Section `hardware` of a scenario that selects these step costs; null for a "
        "packaged profile."
    )


class ProfilesAnswer(Answer):
    """Answer of ``simkv profile list``."""

    profiles: list[ProfileRow]


class DiagnoseAnswer(Answer):
    """Answer of ``simkv diagnose``."""

    triage: list[str] = Field(description="Findings from the log lines alone.")
    answer: list[str] = Field(description="Lines of the answer after the simulation; may be empty.")
    healthy: bool | None = Field(description="Null if there is no answer yet.")
    explained: bool | None = Field(description="Whether the simulation reproduces the incident.")
    cause: str
    folder: str
    files: list[str]


class CheckSchedulerAnswer(Answer):
    """Answer of ``simkv check-scheduler``."""

    ok: bool
    scenarios: int
    broken: str = Field(description="The violated invariant, or empty.")
    counterexample: str | None = Field(
        description="File with the smallest scenario that violates the invariant."
    )


class WhatIfAnswer(Answer):
    """Answer of ``simkv whatif``."""

    model_config = ConfigDict(extra="allow")
    scenario: str
    variant: str
    base: Values
    changes: list[Values] = Field(description="All changes, best first.")


class BisectAnswer(Answer):
    """Answer of ``simkv bisect``."""

    model_config = ConfigDict(extra="allow")
    scenario: str
    variant: str
    flips: list[Values] = Field(description="Pairs of adjacent values with different results.")
    samples: list[Values]


class ComparedFigureAnswer(_Part):
    """Measured and predicted value of a metric."""

    name: str
    measured: float
    predicted: float
    error: float = Field(description="Relative error of the prediction.")
    low: float | None = Field(default=None, description="Low end of the 90 % interval.")
    high: float | None = Field(default=None, description="High end of the 90 % interval.")


class CheckedFileAnswer(_Part):
    """Result of a load generator and its prediction."""

    file: str
    requests: int
    figures: list[ComparedFigureAnswer]
    causes: list[str] = Field(default=[], description="Likely causes of errors.")


class ValidateAnswer(Answer):
    """Answer of ``simkv validate`` for results of load generators."""

    files: list[CheckedFileAnswer]


class HeldOutStepsAnswer(_Part):
    """Relative errors on steps or requests that were held out from the fit; 0.01 is 1 %."""

    points: int
    median: float = Field(description="Median of the absolute error.")
    p95: float = Field(description="95th percentile of the absolute error.")
    bias: float = Field(description="Mean of the signed error.")


class CalibrateAnswer(Answer):
    """Answer of ``simkv calibrate``: factors fitted to benchmark results, or the errors of a fitted
    profile.
    """

    decode: float | None = Field(
        default=None, description="Factor that multiplies the time of decode steps."
    )
    prefill: float | None = Field(
        default=None, description="Factor that multiplies the time of steps with prefills."
    )
    latency_ms: float | None = None
    request_ms: float | None = None
    fitted: list[CheckedFileAnswer] = []
    left_out: list[CheckedFileAnswer] = Field(
        default=[], description="Prediction from a fit to the other files."
    )
    steps: int | None = Field(default=None, description="Number of steps in the files.")
    held_out: dict[str, HeldOutStepsAnswer] = Field(
        default={},
        description="Errors by kind of step or metric, on steps or requests that were held out "
        "from the fit.",
    )
    written: str


#: Answer model of each command that has ``--json``, except ``trace inspect``, whose keys are
#: metrics.
ANSWERS: dict[str, type[Answer]] = {
    "run": RunAnswer,
    "explain": ExplainAnswer,
    "diagnose": DiagnoseAnswer,
    "compare": CompareAnswer,
    "diff": DiffAnswer,
    "zoo": ZooAnswer,
    "plan": PlanAnswer,
    "sweep": SweepAnswer,
    "whatif": WhatIfAnswer,
    "bisect": BisectAnswer,
    "blocks": BlocksAnswer,
    "conform": ConformAnswer,
    "check-scheduler": CheckSchedulerAnswer,
    "policies": PoliciesAnswer,
    "profile list": ProfilesAnswer,
    "validate": ValidateAnswer,
    "calibrate": CalibrateAnswer,
}


def list_verdicts(result: RunResult) -> list[VerdictText]:
    """Return the verdicts of a run, the main verdict first."""
    return [
        VerdictText(name=one.name, text=one.text, requests=list(one.requests))
        for one in result.diagnosis.verdicts
    ]


def list_expectations(checks: Sequence[ExpectationCheck]) -> list[Expectation]:
    """Return the checked expectations."""
    return [Expectation(variant=one.variant, text=str(one), ok=one.ok) for one in checks]


def build_run_answer(
    results: Mapping[str, RunResult],
    lines: Sequence[str],
    checks: Sequence[ExpectationCheck],
    folder: str,
    files: Sequence[str],
) -> RunAnswer:
    """Return the answer of a run. ``lines`` are the printed lines of the form ``LABEL: text``."""
    return RunAnswer(
        scenario=next(iter(results.values())).scenario.name,
        answer={label: text for label, _, text in (line.partition(": ") for line in lines)},
        variants={
            name: RunVariant(
                verdict=str(result.summary["verdict"]),
                verdicts=list_verdicts(result),
                summary=result.summary,
            )
            for name, result in results.items()
        },
        expectations=list_expectations(checks),
        folder=folder,
        files=list(files),
    )


def build_explain_answer(
    results: Mapping[str, RunResult], request: int | None, session: int | None = None
) -> ExplainAnswer:
    """Return the explanation of all variants, and of one request or session in each."""
    return ExplainAnswer(
        variants={
            name: ExplainedVariant(
                verdict=str(result.summary["verdict"]),
                verdict_detail=str(result.summary["verdict_detail"]),
                verdicts=list_verdicts(result),
                seconds_by_kind={
                    kind.value: spent for kind, spent in result.diagnosis.totals.items()
                },
                request=None if request is None else explain_request_data(result, request),
                session=None if session is None else explain_session_data(result, session),
            )
            for name, result in results.items()
        }
    )


def explain_request_data(result: RunResult, number: int) -> ExplainedRequest:
    """Return a request's waiting intervals and its blockers."""
    from simkv.explain.ledger_kinds import KIND_LABELS
    from simkv.metrics.run_metrics import e2e

    life, found = result.record.requests[number], result.diagnosis
    return ExplainedRequest(
        request=number,
        outcome=life.outcome.value if life.outcome else None,
        arrival_s=life.request.arrival,
        e2e_s=e2e(life),
        lasted_s=(life.ended_at or result.record.end) - life.request.arrival,
        intervals=[
            WaitInterval(
                what=tile.kind.value,
                words=KIND_LABELS[tile.kind],
                start_s=tile.start,
                seconds=tile.seconds,
            )
            for tile in found.ledger[number]
        ],
        blockers=[
            BlockingRequest(request=blocker.id, seconds=blocker.seconds)
            for blocker in found.blockers_of(number)
        ],
    )


def explain_session_data(result: RunResult, number: int) -> ExplainedSession:
    """Return the turns of a session and its time by activity."""
    from simkv.metrics.session_turns import find_start_wait, list_sessions, list_turns
    from simkv.report.session_explanation import sum_session_time

    record, clients = result.record, result.run.clients
    lives = list_sessions(record, clients)[number]
    turns = []
    for turn in list_turns(record, clients, lives):
        life = record.requests[turn.request]
        turns.append(
            ExplainedTurn(
                request=turn.request,
                turn=turn.turn,
                before=list(turn.before),
                tool_s=turn.tool_time,
                think_s=turn.think_time,
                arrival_s=turn.arrived,
                waited_s=turn.waited,
                end_s=turn.ended,
                outcome=life.outcome.value if life.outcome else None,
                prompt_tokens=life.request.prompt_tokens,
                cached_tokens=turn.cached,
                recomputed_tokens=turn.recomputed,
                critical=turn.critical,
            )
        )
    return ExplainedSession(
        session=number,
        start_wait_s=find_start_wait(clients, lives),
        turns=turns,
        critical_seconds=sum_session_time(result, number),
    )


def build_compare_answer(found: ChangeCheck, tolerance: float) -> CompareAnswer:
    """Return the answer with the changes of metrics and requests."""
    beyond = found.beyond(tolerance)

    def rows(changed: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {
                "request": one.id,
                "before_s": one.before,
                "after_s": one.after,
                "outcome_before": one.outcome_before,
                "outcome_after": one.outcome_after,
            }
            for one in changed
        ]

    return CompareAnswer(
        requests=found.requests,
        seeds=found.seeds,
        with_errors=found.with_errors,
        tolerance=tolerance,
        figures=[
            FigureChangeAnswer(
                name=one.name,
                before=one.before,
                after=one.after,
                change=one.change,
                low=one.low,
                high=one.high,
                beyond_tolerance=one in beyond,
            )
            for one in found.figures
        ],
        worse=rows(found.worse),
        better=rows(found.better),
        ok=not beyond,
    )


def build_zoo_answer(
    results: Mapping[str, Sequence[ExpectationCheck]], comparisons: list[Values]
) -> ZooAnswer:
    """Return the answer of ``simkv zoo``.

    It contains the checks of packaged incidents. With ``--source``, it also compares the source
    with a release.
    """
    incidents = [
        IncidentChecks(
            name=name, ok=all(one.ok for one in checks), expectations=list_expectations(checks)
        )
        for name, checks in results.items()
    ]
    ok = all(one.ok for one in incidents)
    return ZooAnswer(incidents=incidents, ok=ok, comparisons=comparisons)


def build_policies_answer(counts: Mapping[str, Mapping[str, Mapping[str, int]]]) -> PoliciesAnswer:
    """Return the answer with all simulated engine versions.

    ``counts`` contains the numbers of recordings by engine and version.
    """
    from simkv.schedulers.engine_registry import ENGINES, list_variants

    return PoliciesAnswer(
        policies=[
            Policy(
                engine=engine,
                variant=name,
                summary=variant.summary,
                source=variant.source,
                recorded=counts[engine].get(name, {}).get("recorded", 0),
                equal=counts[engine].get(name, {}).get("equal", 0),
            )
            for engine in ENGINES
            for name, variant in list_variants(engine).items()
        ]
    )


def build_diff_answer(found: RunDiff) -> DiffAnswer:
    """Return the answer with the differences between two runs."""
    return DiffAnswer(
        same=found.same,
        only=list(found.only),
        variants=[
            {
                "before": one.before,
                "after": one.after,
                "settings": {
                    path: [str(value) for value in pair] for path, pair in one.settings.items()
                },
                "figures": {name: list(pair) for name, pair in one.figures.items()},
                "outcomes": {str(id_): list(pair) for id_, pair in one.outcomes.items()},
                "first_differing_step": one.step
                and {
                    "step": one.step.step,
                    "before": one.step.before and dict(one.step.before),
                    "after": one.step.after and dict(one.step.after),
                },
            }
            for one in found.variants
        ],
    )


def answer_schema(command: str) -> dict[str, Any]:
    """Return the JSON schema of a command's answer (see ``ANSWERS``)."""
    return ANSWERS[command].model_json_schema(mode="serialization")
