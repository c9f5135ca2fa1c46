"""Wording of results, shared by the console, the HTML page and ``simkv explain``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import log
from typing import Any, NamedTuple

from simkv.core.figure_registry import METRICS, figure, format_seconds, is_lower_bound
from simkv.core.outcome import FAILURES, SERVED, Outcome, count_served, humanize
from simkv.explain.blame import PREEMPTION_LABELS
from simkv.explain.bottleneck import find_bottleneck
from simkv.explain.diagnosis import Diagnosis
from simkv.explain.ledger_kinds import COMPUTE_KINDS, KIND_LABELS, LedgerSegment
from simkv.explain.verdicts.head_of_line import HeadOfLineBlocking
from simkv.explain.verdicts.thrashing import Thrashing
from simkv.explain.verdicts.unserved_requests import Starvation
from simkv.explain.verdicts.verdict import Verdict
from simkv.explain.wait_ledger import total_by_kind
from simkv.metrics.run_metrics import compute_slowdown, e2e
from simkv.metrics.run_result import RunResult
from simkv.scenario.run_fields import WORLD_FIELDS, FieldDifference, find_differences
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.run_record import RequestRecord, RunRecord

#: Maximum number of requests whose blockers are added up, because this takes time.
MAX_BLOCKED_REQUESTS = 60
#: Minimum wait for a resource, as a fraction of the requests' time, for which the resource is named
#: as the cause: with a verdict, and without one. Without a verdict, the wait must also reach
#: ``MIN_CAUSE_WAIT_S`` per request, which is the shortest delay that a user could notice.
MIN_WAIT_SHARE = 0.01
MIN_CAUSE_SHARE = 0.05
MIN_CAUSE_WAIT_S = 0.05
#: Minimum time of requests, relative to their time in isolation, for which the sharing of steps is
#: named as the cause.
MIN_SLOWDOWN = 3.0
#: Metrics for the comparison of two variants; lower is better for all of them.
COMPARED_FIGURES = tuple(
    METRICS[name]
    for name in (
        "longest_stall_s",
        "ttft_ms.mean",
        "e2e_ms.mean",
        "e2e_ms.p99",
        "preemptions",
        "recomputed_tokens",
    )
)


#: Explanation of the mark for a lower bound; see ``format_metric``.
LOWER_BOUND_NOTE = (
    '">": lower bound, because requests without a token or answer are counted with their '
    "waiting time."
)


def format_metric(summary: Mapping[str, Any], key: str, show: Callable[[Any], str]) -> str:
    """Return a metric as text: ``>`` marks a lower bound, ``none`` means no samples."""
    value = figure(summary, key)
    if value is None:
        return "none"
    return ("> " if is_lower_bound(summary, key) else "") + show(value)


def format_served(summary: Mapping[str, Any]) -> str:
    """Return ``all requests``, or ``280 of 300 requests``."""
    served = count_served(summary)
    if served == summary["requests"]:
        return "all requests"
    return f"{served:,} of {summary['requests']:,} requests"


def format_outcome_counts(record: RunRecord) -> str:
    """Return the outcomes of the requests, such as ``16 of 40 finished, 24 starved``."""
    count = Counter(life.outcome for life in record.requests.values())
    parts = [f"{count[Outcome.FINISHED]:,} of {len(record.requests):,} finished"]
    others = (*FAILURES, Outcome.CANCELLED)
    parts += [f"{count[outcome]:,} {outcome.word}" for outcome in others if count[outcome]]
    return ", ".join(parts)


_MIGHT = {
    Outcome.STALLED: "stall",
    Outcome.LOST: "be lost",
    Outcome.STARVED: "starve",
    Outcome.REJECTED: "be rejected",
    Outcome.TIMED_OUT: "time out",
    Outcome.CUT_OFF: "be cut off",
}


def might(result: RunResult) -> str:
    """Return a phrase with the number of requests that might fail, given the error of the step
    times.

    The phrase is empty if the number does not depend on the error.

    Example: ``0 to 290 of 300 requests might starve, given the error of the step times``
    """
    intervals = result.fidelity.intervals
    found = [
        f"{ends.low:,.0f} to {ends.high:,.0f}{{}} might {word}"
        for outcome, word in _MIGHT.items()
        if (ends := intervals.get(outcome)) and ends.low != ends.high
    ]
    if not found:
        return ""
    count = result.summary["requests"]
    first, *others = found
    first = first.format(f" of {count:,} requests")
    counts = " and ".join([first, *(o.format("") for o in others)])
    return f"{counts}, given the error of the step times"


def describe_ending(result: RunResult) -> str:
    """Return the verdict of a run. If all requests were served, the first problem is added."""
    word = humanize(result.summary["verdict"])
    if word != "served":
        return word
    wrong = list(dict.fromkeys(verdict.name for verdict in result.diagnosis.verdicts))
    return f"served, {humanize(wrong[0])}" if wrong else word


def describe_affected(result: RunResult, most: int = 8) -> list[str]:
    """Return one phrase per kind of failure, the most severe first.

    Without failures, return a phrase about the slowest request. A phrase lists at most ``most``
    ranges of ids.
    """
    lives = result.record.requests.values()
    said = []
    for outcome in FAILURES:
        failed = [life for life in lives if life.outcome is outcome]
        if not failed:
            continue
        timeouts = {life.request.timeout for life in failed}
        after = f" after {format_seconds(timeouts.pop() or 0.0)}" if len(timeouts) == 1 else ""
        why = {
            Outcome.STARVED: f"; clients gave up{after}",
            Outcome.TIMED_OUT: f"; clients gave up{after}, too early even for an idle server",
        }
        ids = format_request_ids((life.request.id for life in failed), most)
        said.append(f"{ids} ({outcome.word}{why.get(outcome, '')}).")
    if said:
        return said
    done = [(took, life.request.id) for life in lives if (took := e2e(life)) is not None]
    if not done:
        return []
    took, slowest = max(done, key=lambda found: (found[0], -found[1]))
    return [f"none. Slowest: request {slowest} ({format_seconds(took)})."]


def describe_cause(result: RunResult, verdicts: Sequence[Verdict] | None = None) -> str:
    """Return sentences about the cause of the most severe verdict and its effect on requests.

    Without a verdict, the cause is the resource for which requests waited. By default, ``verdicts``
    are all verdicts of the run.
    """
    found = result.diagnosis
    verdicts = found.verdicts if verdicts is None else verdicts
    first, *others = [getattr(verdict, "found", verdict) for verdict in verdicts] or [None]
    if isinstance(first, Thrashing):
        return _describe_preemptions(found)
    if isinstance(first, Starvation):
        requests, lanes = first.all, [found.ledger[first.requests[0]]]
    elif first is None or isinstance(first, HeadOfLineBlocking):
        requests, lanes = tuple(result.record.requests), list(found.ledger.values())
    else:
        return f"{verdicts[0].text}."
    waits, lived = _largest_waits(lanes, 0.005)
    shares = format_shares(waits, lived)
    bottleneck, seconds = _find_bottleneck(result, requests)
    hardly = "none; requests hardly waited" if first is not None else _describe_no_wait(result)
    if bottleneck is None or not waits or seconds < MIN_WAIT_SHARE * lived:
        return f"{hardly}."
    least = max(MIN_CAUSE_SHARE * lived, MIN_CAUSE_WAIT_S * len(requests))
    if first is None and seconds < least:
        return f"{hardly} ({shares})."
    said = [f"{bottleneck}."]
    if any(isinstance(verdict, Thrashing) for verdict in others):
        said.append(_describe_preemptions(found))
    if isinstance(first, Starvation):
        blocker = first.main_blocker
        behind = "" if blocker is None else f", mainly because of request {blocker}"
        said.append(f"Time of request {first.requests[0]}: {shares}{behind}.")
        if first.overtaken and (count := first.overtaken.others) > 1:
            said.append(f"{count:,} later requests were admitted before it.")
    else:
        said.append(f"Time of all requests: {shares}.")
    if isinstance(first, HeadOfLineBlocking):
        said.append(f"Head-of-line blocking for {format_seconds(first.seconds)}.")
    return " ".join(said)


def _describe_no_wait(result: RunResult) -> str:
    """Return the cause if requests hardly waited: none, or the sharing of steps."""
    times = compute_slowdown(result.record)
    if times < MIN_SLOWDOWN:
        return "none; requests hardly waited"
    return (
        "many requests share each step. They hardly wait, but their prefill and decode take "
        f"{times:.1f} times as long as in isolation"
    )


def _largest_waits(
    lanes: Sequence[Sequence[LedgerSegment]], least: float
) -> tuple[list[tuple[float, str]], float]:
    """Return the three largest waits (s) with their labels, and the total time of the requests (s).

    ``lanes`` contains the intervals of each request. Waits below the fraction ``least`` of the
    total time are left out.
    """
    sums = total_by_kind(tile for tiles in lanes for tile in tiles)
    total = sum(sums.values())
    waits = [(time, KIND_LABELS[kind]) for kind, time in sums.items() if kind not in COMPUTE_KINDS]
    return [wait for wait in sorted(waits, reverse=True)[:3] if wait[0] >= least * total], total


def format_shares(parts: Iterable[tuple[float, str]], total: float) -> str:
    """Return labelled durations as percentages, such as ``92 % decode, 5 % prefill``."""
    return ", ".join(f"{100 * seconds / total:.0f} % {label}" for seconds, label in parts if total)


class _ReplicaBottleneck(NamedTuple):
    """Bottleneck of one replica: the waits for it in seconds, a phrase, and the name of the setting
    that limits it, if known.
    """

    seconds: float
    phrase: str
    setting: str | None


def _find_bottleneck(result: RunResult, requests: Collection[int]) -> tuple[str | None, float]:
    """Return a phrase about the bottleneck of the requests, and their waits for it in seconds.

    In a fleet, the phrase is about the replica with the longest waits. The waits are of all
    replicas.
    """
    found = _find_bottlenecks(result, requests)
    if not found:
        return None, 0.0
    return max(found, key=lambda one: one.seconds).phrase, sum(one.seconds for one in found)


def find_limiting_setting(result: RunResult) -> str | None:
    """Return the name of the engine setting for which requests waited longest, or None.

    A setting counts only if the KV cache has free space, so that another value can help.
    """
    found = _find_bottlenecks(result, result.record.requests)
    return max(found, key=lambda one: one.seconds).setting if found else None


def _find_bottlenecks(result: RunResult, requests: Collection[int]) -> list[_ReplicaBottleneck]:
    found = []
    for lifetime in result.run.lifetimes:
        record, config = lifetime.engine.record, result.specs[lifetime.replica].engine
        here = [i for i in requests if i in record.requests]
        if here and (bottleneck := find_bottleneck(record, result.diagnosis.ledger, here)):
            where, spec = f"{lifetime.name}: " if result.fleet else "", find_engine_spec(config)
            phrase = where + bottleneck.describe(config, spec)
            setting = bottleneck.limiting_setting(spec)
            found.append(_ReplicaBottleneck(bottleneck.seconds, phrase, setting))
    return found


def describe_blockers(record: RunRecord, found: Diagnosis) -> list[str]:
    """Return phrases about the waits and blockers of the failed requests, or of all if none failed.

    A blocker is a request that holds a resource for which another request waits. Times are in
    seconds and summed over requests.
    """
    failed = [life for life in record.requests.values() if life.outcome not in SERVED]
    said = []
    if blockers := _blockers(record, found, len(failed)):
        some = (
            f", for the {MAX_BLOCKED_REQUESTS} requests with the longest waits"
            if len(failed) > MAX_BLOCKED_REQUESTS
            else ""
        )
        said.append(f"{format_blockers(blockers)}{some}.")
    asked = failed or list(record.requests.values())
    waits, lived = _largest_waits([found.ledger.get(life.request.id, ()) for life in asked], 0.03)
    if waits:
        whose = "unserved" if failed else "all"
        said.append(f"Time of {whose} requests: {format_shares(waits, lived)}.")
    if found.preemptions:
        said += filter(None, (_describe_preemptions(found), _describe_beneficiaries(found)))
    return said or ["No request waited for another one."]


def format_blockers(blockers: Sequence[tuple[int, float]]) -> str:
    """Return the ids of blockers with the waiting time that they caused.

    The phrase has the form ``Main blockers: requests 5 (9 s), 1 (3 s)``.
    """
    label = "request" if len(blockers) == 1 else "requests"
    return f"Main blockers: {label} " + ", ".join(f"{i} ({format_seconds(s)})" for i, s in blockers)


def describe_waste(found: Diagnosis) -> str:
    """Return a sentence about GPU time for tokens that no client received, or "" if there is
    none.
    """
    waste = found.waste
    if waste.total <= 0:
        return ""
    parts = {
        "after the client had left": waste.gone,
        "for discarded tokens": waste.dropped,
        "for recomputed tokens": waste.recompute,
    }
    said = ", ".join(
        f"{format_seconds(spent)} {what}" for what, spent in parts.items() if spent > 0
    )
    return f"Wasted GPU time (of {format_seconds(waste.busy)} in total): {said}."


def describe_overtakes(found: Diagnosis) -> str:
    """Return sentences about requests that later requests overtook, or "" if there are none."""
    if not found.worst_overtakes:
        return ""
    first, count = found.worst_overtakes[0], len(found.worst_overtakes)
    return (
        f"{count} request{'s' if count > 1 else ''} started after requests that arrived later. "
        f"Longest: {first.others} later request{'s' if first.others > 1 else ''} overtook "
        f"request {first.victim}; request {first.by} started {format_seconds(first.seconds)} "
        "earlier."
    )


def describe_step_times(basis: str, points: int, rms_s: float | None) -> str:
    """Return a phrase with the basis of step times, the number of measurements, and the rms
    error.
    """
    count = f", points: {points}" if points else ""
    return f"{basis}{count}{'' if rms_s is None else f', rms error {format_seconds(rms_s)}'}"


def _describe_preemptions(found: Diagnosis) -> str:
    """Return a sentence with the number of preemptions, their main reason, and their cost."""
    count = len(found.preemptions)
    reasons = Counter(taken.why for taken in found.preemptions)
    reason = PREEMPTION_LABELS.get(max(reasons, key=lambda why: reasons[why]), "")
    text = f"{count:,} preemption{'s' if count > 1 else ''} {reason}".rstrip()
    if found.recompute_tokens:
        waste, busy = found.waste.recompute, found.waste.busy
        share = f", {100.0 * waste / busy:.0f} % of GPU time" if busy > 0.0 else ""
        text += (
            f"; {found.recompute_tokens:,} tokens were recomputed ({format_seconds(waste)}{share})"
        )
    return f"{text}."


def _describe_beneficiaries(found: Diagnosis) -> str:
    """Return a phrase about the requests that gained most from preemptions, or "" if unknown."""
    gains = Counter(p.by for p in found.preemptions if p.by not in (None, p.victim))
    if not gains:
        return ""
    most = sorted(gains.items(), key=lambda item: (-item[1], item[0]))[:3]
    names = ", ".join(f"{i} ({times:,})" if times > 1 else str(i) for i, times in most)
    label = "request" if len(most) == 1 else "requests"
    return f"Preempted{' mostly' if len(gains) > 1 else ''} in favor of {label} {names}."


def describe_main_victim(found: Diagnosis) -> str:
    """Return a sentence about the most preempted request and its main beneficiary.

    Example: ``Request 0 lost its KV to request 1.``
    """
    victims = Counter(taken.victim for taken in found.preemptions)
    if not victims:
        return ""
    victim, times = min(victims.items(), key=lambda item: (-item[1], item[0]))
    by = Counter(taken.by for taken in found.preemptions if taken.victim == victim)
    sake, often = min(by.items(), key=lambda item: (-item[1], item[0] is None, item[0] or 0))
    whose = "other requests" if sake is None else "itself" if sake == victim else f"request {sake}"
    count = "" if times == 1 else f" {times:,} times,"
    most = " mostly" if often < times else ""
    return f"Request {victim} lost its KV{count}{most} to {whose}."


def sort_by_waiting(
    record: RunRecord, found: Diagnosis, most: int = MAX_BLOCKED_REQUESTS
) -> list[RequestRecord]:
    """Return at most ``most`` requests: failed ones first, then by decreasing waiting time."""

    def waited(life: RequestRecord) -> float:
        return sum(i.seconds for i in found.ledger[life.request.id] if i.kind not in COMPUTE_KINDS)

    return sorted(
        record.requests.values(),
        key=lambda life: (life.outcome in SERVED, -waited(life), life.request.id),
    )[:most]


def _blockers(record: RunRecord, found: Diagnosis, failed: int) -> list[tuple[int, float]]:
    """Return the four main blockers of the failed requests, with the waiting time that they caused.

    If ``failed`` is 0, all requests count.
    """
    if not failed:
        return [(blocker.id, blocker.seconds) for blocker in found.blockers[:4]]
    sums: dict[int, float] = defaultdict(float)
    for life in sort_by_waiting(record, found, min(failed, MAX_BLOCKED_REQUESTS)):
        for blocker in found.blockers_of(life.request.id):
            sums[blocker.id] += blocker.seconds
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:4]


def select_variant(results: Mapping[str, RunResult]) -> str:
    """Return the name of the main variant of the report: the first variant with unserved requests.

    If all variants serve all requests, it is the first variant with a verdict, or the first
    variant.
    """
    unserved = (name for name, result in results.items() if result.summary["verdict"] != "served")
    ill = (name for name, result in results.items() if result.diagnosis.verdicts)
    return next(unserved, None) or next(ill, None) or next(iter(results))


def title(results: Mapping[str, RunResult]) -> str:
    """Return the names of the scenarios as a title."""
    return " and ".join(dict.fromkeys(result.scenario.name for result in results.values()))


def select_pair(results: Mapping[str, RunResult]) -> list[str]:
    """Return the names of the variants that the plots show initially: the main variant and another
    one.
    """
    lead = select_variant(results)
    other = find_better_variant(results, lead) or next(
        (name for name in results if name != lead), None
    )
    return [lead] if other is None else [lead, other]


def find_better_variant(results: Mapping[str, RunResult], name: str) -> str | None:
    """Return the variant that serves the most requests, if it is better than the variant ``name``.

    A variant is better if it serves more requests, or as many requests with a higher
    ``improvement``. Only variants with the same workload and costs are compared. Returns None if no
    variant is better.
    """
    ours = results[name].summary
    better = {
        other: result
        for other, result in results.items()
        if has_same_world(results[name].scenario, result.scenario)
        and _is_better(ours, result.summary)
    }

    def rank(other: str) -> tuple[float, int, int, float]:
        theirs = better[other].summary
        differ = len(find_differences(results[name].scenario, better[other].scenario))
        if _share(theirs) == _share(ours):
            differ = 0  # no requests become served, so only the metrics are compared
        return -_share(theirs), _hopeless(theirs), differ, -improvement(ours, theirs)

    return min(better, key=rank, default=None)


def has_same_world(ours: Scenario, theirs: Scenario) -> bool:
    """Return whether two variants have the same workload and the same step costs."""
    return all(getattr(ours, name) == getattr(theirs, name) for name in WORLD_FIELDS)


def _is_better(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    if _share(theirs) == _share(ours):
        return improvement(ours, theirs) >= 0.02
    return _share(theirs) > _share(ours)


def _share(figures: Mapping[str, Any]) -> float:
    share: float = count_served(figures) / max(figures["requests"], 1)
    return share


def _hopeless(figures: Mapping[str, Any]) -> int:
    """Return the number of requests that waited and never got an answer."""
    count: int = figures["stalled"] + figures["lost"] + figures["starved"]
    return count


def improvement(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Return the overall improvement: the sum of the logarithms of the ratios of COMPARED_FIGURES.

    Counts, such as the number of preemptions, have a fifth of the weight of times.
    """
    total = 0.0
    for metric in COMPARED_FIGURES:
        before, after = figure(ours, metric.key), figure(theirs, metric.key)
        if before is None or after is None:
            continue
        total += (1.0 if metric.unit else 0.2) * log((before + 1.0) / (after + 1.0))
    return total


def describe_fix(results: Mapping[str, RunResult], name: str, other: str | None) -> list[str]:
    """Return sentences about the settings and metrics that differ between variants ``name`` and
    ``other``.
    """
    if len(results) == 1:
        return ["No other variant was run."]
    if other is None:
        return ["No other variant with this workload serves more requests or is faster."]
    ours, theirs = results[name], results[other]
    differ = find_differences(ours.scenario, theirs.scenario)
    a, b = ours.summary, theirs.summary
    more = count_served(b) != count_served(a)
    said = [f"Variant {other} serves {format_served(b)}{'' if more else ' too'}."]
    if len(differ) <= 4:
        said.append(f"It changes {'; '.join(map(str, differ))}.")
    else:
        said.append(f"It changes {len(differ)} fields, including {differ[0]}.")
    if summary := _rule(theirs.scenario, differ):
        said.append(f"The rule: {summary}.")
    gains: dict[str, list[str]] = {"Better": [], "Worse": []}
    for metric in COMPARED_FIGURES:
        if a["stalled"] or (more and "." in metric.key):
            continue  # the run ended early, or the latencies are of different requests
        before, after = figure(a, metric.key), figure(b, metric.key)
        if before is None or after is None:
            continue
        if abs(before - after) > 0.02 * max(before, after):
            which = gains["Better" if after < before else "Worse"]
            which.append(f"{metric.label} {metric.format(before)} → {metric.format(after)}")
    return said + [f"{word}: {'; '.join(which)}." for word, which in gains.items() if which]


def _rule(scenario: Scenario, differ: Sequence[FieldDifference]) -> str | None:
    """Return the summary of the engine variant if the scenarios differ in the engine variant."""
    if not any(found.field == "engine.variant" for found in differ):
        return None
    return find_engine_spec(scenario.engine).variant(scenario.engine.variant).summary


def format_request_ids(ids: Iterable[int], most: int = 8) -> str:
    """Return ids as ranges, such as ``requests 16 to 39, 41``, at most ``most`` ranges."""
    ordered = sorted(ids)
    runs: list[list[int]] = []
    for i in ordered:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    names = [
        str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs[:most]
    ]
    rest = sum(b - a + 1 for a, b in runs[most:])
    more = f" and {rest:,} more" if rest else ""
    return f"request{'s' if len(ordered) != 1 else ''} {', '.join(names)}{more}"
