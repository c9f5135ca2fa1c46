"""The answer in plain words: five lines first, then what they rest on, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from simkv.core.figures import seconds
from simkv.ingest.compare import Likeness
from simkv.ingest.engine import ServerSetup
from simkv.ingest.evidence import Evidence
from simkv.ingest.mend import Mending, Remedy
from simkv.measure.result import Result
from simkv.why.ledger import SERVED, WAITS, WORDS, Kind, totals
from simkv.why.verdicts.verdict import Verdict

#: A server is well whose requests wait for less than this share of their time, and of whom the
#: worst decile waits for less than the second share.
WELL, WORST = 0.05, 0.3
#: Nor is it well if requests take so many times as long as alone, and be it that all of them run.
SLOW = 2.0
#: Waits that the operator can do something about: not the moments between steps.
BLAMED = (WAITS | {Kind.HELD_UP, Kind.STALLED, Kind.RECOMPUTE}) - {Kind.UNSEEN}
#: Remedies and victims that are named.
NAMED = 5


@dataclass(frozen=True)
class Waiting:
    """What the simulated requests waited for: seconds by kind, and each request's share."""

    kinds: dict[Kind, float]
    share: float
    worst: float
    victims: list[int]


def waiting(result: Result) -> Waiting:
    """Who waited, how long and for what; ``victims`` are the worst decile, the worst first."""
    lived, lost = {}, {}
    ledger = result.diagnosis.ledger
    for i, tiles in ledger.items():
        lived[i] = sum(tile.seconds for tile in tiles) or 1e-9
        lost[i] = sum(tile.seconds for tile in tiles if tile.kind in BLAMED)
    kinds = totals(tile for tiles in ledger.values() for tile in tiles if tile.kind in BLAMED)
    worst = sorted(lost, key=lambda i: (-lost[i], i))[: max(len(lost) // 10, 1)]
    share = sum(lost.values()) / max(sum(lived.values()), 1e-9)
    decile = float(np.mean([lost[i] / lived[i] for i in worst])) if worst else 0.0
    return Waiting(kinds, share, decile, [i for i in worst if lost[i] > 0.0])


@dataclass(frozen=True)
class Answer:
    """What is said: ``five`` lines, and the whole text of ``diagnosis.md``.

    ``healthy`` if nothing is wrong; ``explained`` is false where the simulation is not the
    incident's likeness. ``cause`` is the name of the verdict or of the wait, ``remedy`` what comes
    first of what mends it.
    """

    five: tuple[str, ...]
    text: str
    healthy: bool
    explained: bool
    cause: str
    remedy: Remedy | None


def refuse(
    likeness: Likeness, setup: ServerSetup, evidence: Evidence, notes: Sequence[str]
) -> Answer:
    """The answer where the simulation does not reproduce what was observed: what is missing."""
    missed = "; ".join(
        f"{line.name} {line.simulated:.4g} where {line.observed:.4g} was observed"
        for line in likeness.missed[:3]
    )
    asks = [*setup.assumed, *evidence.lacks] or ["something that is not modelled"]
    five = (
        f"No explanation: the simulation does not reproduce {evidence.source}.",
        f"It differs: {missed}.",
        "What was observed is in observed.png and compared.csv, beside what was simulated.",
        f"Not known, and possibly why: {asks[0]}.",
        f"{len(asks)} such points are listed below; --set engine.NAME=VALUE tells one.",
    )
    text = _document(five, likeness, setup, evidence, notes, [])
    return Answer(five, text, False, False, "not reproduced", None)


def answer(
    result: Result,
    observed: pd.DataFrame,
    likeness: Likeness,
    mending: Mending | None,
    setup: ServerSetup,
    evidence: Evidence,
    notes: Sequence[str],
) -> Answer:
    """The answer where it does: whom it hit, why, and what mends it."""
    waits, found = waiting(result), _verdicts_of(result)
    healthy = is_well(result)
    slow = waits.share < WELL and not found
    cause = "nothing" if healthy else "slow in company" if slow else _cause(found, waits)
    remedy = mending.remedies[0] if mending and mending.remedies and not healthy else None
    five = (
        _what(observed, setup, waits, healthy),
        _whom(observed, waits, healthy),
        _slow(result) if slow and not healthy else _why(found, waits, healthy),
        _mends(mending, healthy),
        _trust(likeness, setup),
    )
    rest = [
        *_victims(observed, result, waits),
        *_verdicts(found, waits),
        *(_remedies(mending) if mending and not healthy else ()),
    ]
    text = _document(five, likeness, setup, evidence, notes, rest)
    return Answer(five, text, healthy, True, cause, remedy)


def is_well(result: Result) -> bool:
    """Whether nothing is wrong: no verdict, and next to no waiting."""
    waits = waiting(result)
    calm = waits.share < WELL and waits.worst < WORST
    return not _verdicts_of(result) and calm and slowdown(result) < SLOW


def slowdown(result: Result) -> float:
    """How many times as long all requests took as they would have taken one by one, alone."""
    record = result.record
    both = [
        (life.last_token - life.request.arrival, record.alone_s[i])
        for i, life in record.lives.items()
        if life.last_token is not None and record.alone_s.get(i)
    ]
    return sum(took for took, _ in both) / (sum(alone for _, alone in both) or 1.0) if both else 1.0


def _verdicts_of(result: Result) -> list[Verdict]:
    """What went wrong; a request that was too long for its client is no fault of the server."""
    return [verdict for verdict in result.diagnosis.verdicts if verdict.name != "timed out"]


def _cause(found: Sequence[Verdict], waits: Waiting) -> str:
    if found:
        return found[0].name
    return WORDS[max(waits.kinds, key=lambda kind: waits.kinds[kind])]


def _what(observed: pd.DataFrame, setup: ServerSetup, waits: Waiting, healthy: bool) -> str:
    engine = f"{setup.engine['name']} {setup.engine['variant']}"
    count, failed = len(observed), int((observed["output_tokens"] == 0).sum())
    spent = seconds(float(observed["t_s"].max() - observed["t_s"].min()))
    head = f"{count} requests within {spent} on {engine}"
    without = f", {failed} without an answer" if failed else ""
    if healthy:
        return f"Nothing is wrong: of {head}{without}, nobody waited for long."
    return f"{head}{without}: {100 * waits.share:.0f} % of all their time was waiting."


def _whom(observed: pd.DataFrame, waits: Waiting, healthy: bool) -> str:
    failed = observed.index[observed["output_tokens"] == 0].tolist()
    if failed:
        return f"Victims: {_names(observed, failed)} got no answer."
    if healthy or not waits.victims:
        slowest = int(observed["e2e_ms"].to_numpy(np.float64).argmax())
        took = seconds(observed["e2e_ms"].max() / 1e3)
        return f"The slowest, {_name(observed, slowest)}, took {took}."
    by_wait = observed["queue_ms"].nlargest(len(waits.victims))
    if by_wait.notna().any() and by_wait.iloc[0] > 0:
        worst = by_wait.index.tolist()
        waited = seconds(by_wait.iloc[0] / 1e3)
        took = seconds(observed.loc[worst[0], "e2e_ms"] / 1e3)
        most = f"the first of them queued for {waited} of its {took}"
        return f"Victims: {_names(observed, worst)}; {most}."
    return f"Victims: {_names(observed, waits.victims)}."


def _why(found: Sequence[Verdict], waits: Waiting, healthy: bool) -> str:
    if healthy:
        return (
            f"Waiting was {100 * waits.share:.1f} % of all time, {100 * waits.worst:.0f} % for the "
            "worst decile."
        )
    if found:
        return f"Cause: {found[0].name}: {found[0].text}."
    total = sum(waits.kinds.values()) or 1e-9
    first = sorted(waits.kinds.items(), key=lambda item: -item[1])[:2]
    said = ", ".join(f"{100 * spent / total:.0f} % {WORDS[kind]}" for kind, spent in first)
    return f"Cause: of the waiting {said}."


def _slow(result: Result) -> str:
    return (
        f"Cause: nobody waits, but requests take {slowdown(result):.1f} times as long as they "
        "would alone, while they are prefilled or decode."
    )


def _mends(mending: Mending | None, healthy: bool) -> str:
    if healthy:
        return "No flag needs to be changed."
    if mending is None:
        return "What would mend it was not asked."
    flags = mending.of("flag")
    others = [*mending.of("version"), *mending.of("memory")]
    if flags and mending.remedies[0].means != "version":
        return f"What mends it: {_said(flags[0])}."
    if not others:
        return f"No flag mends it: none of {mending.tried} changes that were tried helps."
    best = [mending.remedies[0], *(o for o in others if o is not mending.remedies[0])]
    if flags:
        return f"What mends it: {_said(best[0])}; of the flags {_said(flags[0])}."
    return f"No flag mends it; {' or '.join(_said(one) for one in best[:2])} would."


def _said(remedy: Remedy) -> str:
    told = remedy.effect.sentence.partition(": ")[2].partition(": ")[2]
    told = told or remedy.effect.sentence.partition(" -> ")[2].partition(": ")[2]
    others = len(remedy.effect.slower) + len(remedy.effect.newly_failed)
    cost = f", {others} others slower" if others else ""
    word = {"memory": "a larger cache, ", "version": "", "flag": ""}[remedy.means]
    return f"{word}{remedy.typed} ({told or remedy.effect.judgement}{cost})"


def _trust(likeness: Likeness, setup: ServerSetup) -> str:
    e2e = next((line for line in likeness.lines if line.name.startswith("E2E mean")), None)
    said = (
        f"E2E mean {e2e.simulated:.4g} s simulated, {e2e.observed:.4g} s observed "
        f"({100 * e2e.off:+.1f} %)"
        if e2e
        else "the simulation agrees with what was observed"
    )
    assumed = f"; {len(setup.assumed)} settings assumed" if setup.assumed else ""
    return f"Trust: {said}{assumed}."


def _name(observed: pd.DataFrame, row: int) -> str:
    name = observed.loc[row].get("request")
    return f"request {row} ({name})" if isinstance(name, str) else f"request {row}"


def _names(observed: pd.DataFrame, rows: Sequence[int], most: int = 3) -> str:
    first = ", ".join(_name(observed, row) for row in rows[:most])
    return first + (f" and {len(rows) - most} more" if len(rows) > most else "")


def _victims(observed: pd.DataFrame, result: Result, waits: Waiting) -> Iterator[str]:
    if not waits.victims:
        return
    yield "## Victims"
    yield ""
    yield "| request | arrived (s) | prompt | output | waited (s) | most of it |"
    yield "| --- | --- | --- | --- | --- | --- |"
    begin = observed["t_s"].iloc[0]
    for i in waits.victims[: 2 * NAMED]:
        tiles = [tile for tile in result.diagnosis.ledger[i] if tile.kind not in SERVED]
        sums = totals(tiles)
        kind = max(sums, key=lambda one: sums[one], default=None)
        row = observed.loc[i]
        yield (
            f"| {_name(observed, i)} | {row['t_s'] - begin:.2f} | {row['prompt_tokens']} | "
            f"{row['output_tokens']} | {sum(sums.values()):.2f} | {WORDS[kind] if kind else ''} |"
        )
    yield ""
    blockers = result.diagnosis.blockers[:NAMED]
    if blockers:
        held = ", ".join(f"{_name(observed, b.id)} ({seconds(b.seconds)})" for b in blockers)
        yield f"What they waited for was held above all by {held}."
        yield ""


def _verdicts(found: Sequence[Verdict], waits: Waiting) -> Iterator[str]:
    yield "## Where the time went"
    yield ""
    for verdict in found:
        yield f"- {verdict.name}: {verdict.text}"
    for kind, spent in sorted(waits.kinds.items(), key=lambda item: -item[1]):
        yield f"- {WORDS[kind]}: {seconds(spent)}"
    yield ""


def _remedies(mending: Mending) -> Iterator[str]:
    yield "## What would have helped"
    yield ""
    if not mending.remedies:
        yield f"None of the {mending.tried} changes that were tried."
    for remedy in mending.remedies[: 2 * NAMED]:
        yield f"- {remedy.effect.judgement}: {_said(remedy)}"
    yield ""


def _document(
    five: Sequence[str],
    likeness: Likeness,
    setup: ServerSetup,
    evidence: Evidence,
    notes: Sequence[str],
    rest: Sequence[str],
) -> str:
    lines = [f"# {evidence.source}", "", *(f"{line}  " for line in five), ""]
    lines += ["![observed and simulated](observed.png)", "", *rest]
    lines += ["## Observed and simulated", "", "| figure | observed | simulated | off | agrees |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for line in likeness.lines:
        off = f"{100 * line.off:+.1f} %" if line.observed else ""
        agrees = "yes" if line.agrees else "no"
        lines.append(
            f"| {line.name} | {line.observed:.4g} | {line.simulated:.4g} | {off} | {agrees} |"
        )
    lines += ["", "## The server", ""]
    lines += [
        f"- {name} {setup.engine[name]} ({how})"
        for name, how in setup.sources.items()
        if name in setup.engine
    ]
    lines += [f"- assumed: {one}" for one in setup.assumed]
    lines += [
        "",
        *_listed("Notes", notes),
        *_listed("What the sources do not tell", evidence.lacks),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _listed(title: str, items: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {item}" for item in items), ""] if items else []
