"""Explanation of a run, or of one of its requests, as lines of text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from textwrap import wrap

from simkv.core.figure_registry import format_seconds
from simkv.core.outcome import SERVED, Outcome
from simkv.explain.blame import PREEMPTION_LABELS, Preemption
from simkv.explain.cache_eviction import find_evictors, find_lost_prefixes
from simkv.explain.computed_runs import compute_runs
from simkv.explain.ledger_kinds import KIND_LABELS, LedgerKind, LedgerSegment
from simkv.explain.verdicts.verdict import describe_shortfall
from simkv.explain.wait_ledger import total_by_kind
from simkv.metrics.run_result import RunResult
from simkv.metrics.session_turns import find_slowest_session
from simkv.report.narrative import (
    describe_blockers,
    describe_overtakes,
    describe_waste,
    format_blockers,
    format_outcome_counts,
    format_request_ids,
    format_shares,
    might,
)
from simkv.sim.run_record import RequestRecord, RunRecord

WIDTH = 100
#: Maximum number of timeline lines for one request.
MAX_TIMELINE_LINES = 24


def explain_run(name: str, result: RunResult, command: Callable[[str], str]) -> Iterator[str]:
    """Yield the lines that explain a run.

    ``command`` returns the command line that explains one request or session, given its arguments.
    """
    record, found = result.record, result.diagnosis
    yield from _title(name, result)
    for verdict in found.verdicts:
        yield from wrap_text(verdict.text, f"{verdict.name}: ")
    if not found.verdicts:
        yield "No verdict: no request starved or stalled, and little work was repeated."
    total = sum(found.totals.values())
    if total:
        yield ""
        yield f"Total time of all requests: {format_seconds(total)}"
        yield from format_bars(label_kinds(found.totals))
        yield ""
        yield from wrap_text(" ".join(describe_blockers(record, found)))
        yield from wrap_text(_by_reason(found.preemptions))
    yield from wrap_text(describe_waste(found))
    yield from wrap_text(describe_overtakes(found))
    worst = _worst(record)
    if worst is not None:
        yield ""
        yield f"Explain one request: {command(str(worst))}"
    if result.run.clients.after and record.requests:
        slowest = find_slowest_session(record, result.run.clients)
        yield f"Explain one session: {command(f'--session {slowest}')}"


def explain_run_briefly(name: str, result: RunResult) -> Iterator[str]:
    """Yield a short explanation of one of several runs."""
    found = result.diagnosis
    yield from _title(name, result)
    for verdict in found.verdicts[:2]:
        yield from wrap_text(verdict.text, f"  {verdict.name}: ", most=3)
    total = sum(found.totals.values())
    shares = sorted(found.totals.items(), key=lambda item: -item[1])
    parts = [(spent, KIND_LABELS[kind]) for kind, spent in shares[:5]]
    yield from wrap_text(format_shares(parts, total), "  time: ")


def explain_request(name: str, result: RunResult, request: int) -> Iterator[str]:
    """Yield the lines that explain one request: its intervals and their causes."""
    record, found = result.record, result.diagnosis
    life, tiles = record.requests[request], found.ledger[request]
    asked = life.request
    gave_up = (
        ""
        if asked.timeout is None
        else f"; its client gives up after {format_seconds(asked.timeout)}"
    )
    yield from wrap_text(
        f"Request {request} in {name}: {_end(life)}. Arrival at {asked.arrival:.3f} s, "
        f"{asked.prompt_tokens} prompt tokens, {asked.output_tokens} output tokens{gave_up}."
    )
    for verdict in found.verdicts:
        if request in verdict.requests:
            yield from wrap_text(verdict.text, f"{verdict.name}: ")
    if lacked := record.shortfalls.get(request):
        yield from wrap_text(
            f"Timed out, not starved: {describe_shortfall(lacked, asked.timeout or 0.0)}."
        )
    yield ""
    teller = _Teller(result)
    for line in _elide(tiles):
        if isinstance(line, str):
            yield line
            continue
        what = f"{line.start:>10.3f} s  {format_seconds(line.seconds):>9}  {KIND_LABELS[line.kind]}"
        why = teller.why(life, line)
        yield f"{what}: {why}" if why else what
    yield f"{life.ended_at or record.end:>10.3f} s  {_end(life)}"
    yield ""
    yield f"Time of this request: {format_seconds(sum(tile.seconds for tile in tiles))}"
    yield from format_bars(label_kinds(total_by_kind(tiles)))
    blockers = found.blockers_of(request)
    overtaken = next((o for o in found.worst_overtakes if o.victim == request), None)
    if blockers or overtaken:
        yield ""
    if blockers:
        held = format_blockers([(blocker.id, blocker.seconds) for blocker in blockers[:6]])
        yield from wrap_text(f"{held}.")
    if overtaken:
        later = "One request arrived later and started earlier:"
        if overtaken.others > 1:
            later = f"{overtaken.others} requests that arrived later started earlier, the first was"
        yield from wrap_text(
            f"{later} request {overtaken.by} ({format_seconds(overtaken.seconds)} earlier)."
        )


def _title(name: str, result: RunResult) -> Iterator[str]:
    engine, figures = result.scenario.engine, result.summary
    yield (
        f"{name} ({engine.name} {engine.variant}): {figures['verdict']}, "
        f"{format_outcome_counts(result.record)}"
    )
    if figures["verdict"] != "served":
        yield from wrap_text(str(figures["verdict_detail"]), "  ", most=2)
    yield from wrap_text(might(result), "  ")


def _worst(record: RunRecord) -> int | None:
    """Return the slowest failed request, or the slowest request if none failed."""
    lives = record.requests.values()
    failed = [life for life in lives if life.outcome not in SERVED]
    if not lives:
        return None
    worst = max(
        failed or lives,
        key=lambda life: ((life.ended_at or 0.0) - life.request.arrival, -life.request.id),
    )
    return worst.request.id


def _end(life: RequestRecord) -> str:
    lasted = (life.ended_at or 0.0) - life.request.arrival
    ends = {
        Outcome.FINISHED: "finished",
        Outcome.STARVED: "starved: the client gave up",
        Outcome.TIMED_OUT: "timed out: the client gave up",
        Outcome.REJECTED: "rejected",
        Outcome.LOST: "lost",
        Outcome.STALLED: "stalled permanently",
        Outcome.CANCELLED: "cancelled: another branch ended first",
        Outcome.CUT_OFF: "cut off by the horizon",
    }
    word = ends[life.outcome] if life.outcome else "unfinished"
    tokens = "" if life.outcome is Outcome.FINISHED else f" with {life.tokens} tokens"
    why = f": {life.reason.rstrip('.')}" if life.outcome is Outcome.REJECTED else ""
    return f"{word} after {format_seconds(max(lasted, 0.0))}{tokens}{why}"


def label_kinds(sums: Mapping[LedgerKind, float]) -> dict[str, float]:
    """Replace the kinds of waiting by their labels."""
    return {KIND_LABELS[kind]: spent for kind, spent in sums.items()}


def format_bars(sums: Mapping[str, float]) -> Iterator[str]:
    """Yield one line per label: seconds, share and a bar."""
    total, longest = sum(sums.values()), max(sums.values(), default=0.0)
    width = max([36, *(len(label) + 1 for label in sums)])
    for label, spent in sums.items():
        bar = "█" * round(30 * spent / longest) if longest else ""
        share = 100 * spent / total if total else 0.0
        yield f"  {label:<{width}}{format_seconds(spent):>10}{share:>6.1f} %  {bar}".rstrip()


def _by_reason(preemptions: Sequence[Preemption]) -> str:
    if not preemptions:
        return ""
    counts = Counter(preemption.why for preemption in preemptions).most_common()
    reasons = ", ".join(f"{n} times {PREEMPTION_LABELS.get(why, why)}" for why, n in counts)
    return f"Preempted {reasons}."


def wrap_text(text: str, lead: str = "", most: int | None = None) -> Iterator[str]:
    """Wrap a paragraph at WIDTH, at most ``most`` lines. ``lead`` is the start of the first
    line.
    """
    if not text:
        return
    lines = wrap(text, WIDTH - len(lead)) if len(lead) < 30 else wrap(text, WIDTH)
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: WIDTH - len(lead) - 2] + " …"]
    indent = " " * len(lead)
    for index, line in enumerate(lines):
        yield (indent if index else lead) + line


def _elide(tiles: Sequence[LedgerSegment]) -> Iterator[LedgerSegment | str]:
    """Yield the intervals. A summary line replaces the middle of a long list."""
    if len(tiles) <= MAX_TIMELINE_LINES:
        yield from tiles
        return
    yield from tiles[:12]
    yield _skipped(tiles[12:-8])
    yield from tiles[-8:]


def _skipped(tiles: Sequence[LedgerSegment]) -> str:
    sums = sorted(total_by_kind(tiles).items(), key=lambda item: -item[1])
    said = ", ".join(f"{KIND_LABELS[kind]} {format_seconds(spent)}" for kind, spent in sums[:3])
    lasted = tiles[-1].end - tiles[0].start
    return f"{'…':>12}  {format_seconds(lasted):>9}  {len(tiles)} intervals: {said}"


class _Teller:
    """Text about the cause of a wait: other requests, or a resource."""

    def __init__(self, result: RunResult) -> None:
        self.record = result.record
        self.found = result.diagnosis
        self.found_replicas = result.fleet is not None
        self._prefilled: dict[int, list[int]] = defaultdict(list)
        for i, life in self.record.requests.items():
            for run in compute_runs(life):
                if run.kind is not LedgerKind.DECODE:
                    self._prefilled[run.first].append(i)

    def why(self, life: RequestRecord, tile: LedgerSegment) -> str:
        """Return a phrase about the cause of an interval, or "" if unknown."""
        match tile.kind:
            case LedgerKind.BLOCKS | LedgerKind.RESERVED | LedgerKind.SLOT | LedgerKind.ADAPTER:
                return self._holders(life, tile)
            case LedgerKind.BEHIND:
                return self._heads(tile)
            case LedgerKind.PREEMPTED:
                return self._preempted(life, tile)
            case LedgerKind.HELD_UP:
                return self._prefills(life, tile)
            case LedgerKind.RECOMPUTE | LedgerKind.PREFILL:
                return self._tokens(life, tile)
            case LedgerKind.EVICTED:
                return f"{self._tokens(life, tile)}; {self._evictors(life)}".rstrip("; ")
        return ""

    def _holders(self, life: RequestRecord, tile: LedgerSegment) -> str:
        middle = (tile.start + tile.end) / 2
        held = self.found.pressure.block_holders(middle)
        held.pop(life.request.id, None)
        if not held:
            return "no request held any"
        worst = sorted(held, key=lambda i: (-held[i], i))
        if tile.kind is LedgerKind.SLOT:
            return f"{format_request_ids(worst, 6)} running"
        if tile.kind is LedgerKind.ADAPTER:
            lives, own = self.record.requests, life.request.lora
            worst = [i for i in worst if lives[i].request.lora not in (None, own)]
            names = sorted({str(lives[i].request.lora) for i in worst})
            return f"{format_request_ids(worst, 6)} running with {', '.join(names)}; it needs {own}"
        named = ", ".join(f"{i} ({held[i]})" for i in worst[:4])
        more = f" and {len(worst) - 4} more" if len(worst) > 4 else ""
        return f"held at mid-interval by request{'s' if len(worst) > 1 else ''} {named}{more}"

    def _heads(self, tile: LedgerSegment) -> str:
        heads = self.record.queue_heads
        first = max(bisect_right(heads, tile.start, key=lambda head: head[0]) - 1, 0)
        spent: dict[tuple[int, str], float] = defaultdict(float)
        for index in range(first, len(heads)):
            at, held = heads[index]
            until = heads[index + 1][0] if index + 1 < len(heads) else inf
            if at >= tile.end:
                break
            if held:
                overlap = min(until, tile.end) - max(at, tile.start)
                spent[held.id, KIND_LABELS[LedgerKind(held.why)]] += overlap
        longest = sorted(spent, key=lambda key: (-spent[key], key))
        named = "; ".join(
            f"request {i}, {why}, {format_seconds(spent[i, why])}" for i, why in longest[:2]
        )
        return named + (f"; {len(longest) - 2} more" if len(longest) > 2 else "")

    def _preempted(self, life: RequestRecord, tile: LedgerSegment) -> str:
        taken = [
            p
            for p in self.found.preemptions
            if p.victim == life.request.id and p.at <= tile.start + 1e-9
        ]
        if not taken:
            return ""
        last = taken[-1]
        whose = "other requests" if last.by is None else f"request {last.by}"
        if last.by == life.request.id:
            whose = "its own next tokens because too few blocks were free"
        return f"lost {last.tokens} tokens of KV to {whose}"

    def _prefills(self, life: RequestRecord, tile: LedgerSegment) -> str:
        log = self.record.steps
        first, last = bisect_right(log.end, tile.start), bisect_left(log.start, tile.end)
        ids = {i for row in range(first, last) for i in self._prefilled.get(row, ())}
        return format_request_ids(ids - {life.request.id}, 6) if ids else ""

    def _evictors(self, life: RequestRecord) -> str:
        """Return a phrase about the requests that evicted the prefix, or "" for a fleet."""
        if self.found_replicas:
            return ""
        number = life.request.id
        lost = [prefix for prefix in find_lost_prefixes(self.record) if prefix.request == number]
        named = ", ".join(
            f"{i} ({evicted:.0f} tokens)" for i, evicted in find_evictors(self.record, lost)[:4]
        )
        return f"evicted by {named}" if named else ""

    def _tokens(self, life: RequestRecord, tile: LedgerSegment) -> str:
        starts = self.record.steps.start
        here = [
            run
            for run in compute_runs(life)
            if run.kind is not LedgerKind.DECODE and tile.start <= starts[run.first] < tile.end
        ]
        again = sum(run.recomputed for run in here)
        text = f"{sum(run.tokens for run in here)} tokens"
        return f"{text}, of which {again} had been computed before" if again else text
