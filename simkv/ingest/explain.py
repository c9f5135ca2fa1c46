"""The answer in plain words: five lines first, then what they rest on, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from simkv.core.figures import seconds
from simkv.ingest.compare import Likeness
from simkv.ingest.document import (
    document,
    name_of,
    names_of,
    over_time,
    remedies,
    said,
    verdicts,
    victims,
)
from simkv.ingest.engine import ServerSetup
from simkv.ingest.evidence import Evidence
from simkv.ingest.mend import Mending, Remedy
from simkv.ingest.rebuild import is_drawn
from simkv.ingest.waiting import WELL, Waiting, is_well, slowdown, verdicts_of, victims_of, waiting
from simkv.measure.result import Result
from simkv.why.ledger import WORDS
from simkv.why.verdicts.verdict import Verdict


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
    likeness: Likeness,
    setup: ServerSetup,
    evidence: Evidence,
    notes: Sequence[str],
    beside: pd.DataFrame,
) -> Answer:
    """The answer where the simulation does not reproduce what was observed: what is missing.

    ``beside`` is the table over time.
    """
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
    text = document(five, likeness, setup, evidence, notes, list(over_time(beside)))
    return Answer(five, text, False, False, "not reproduced", None)


def answer(
    result: Result,
    observed: pd.DataFrame,
    likeness: Likeness,
    mending: Mending | None,
    setup: ServerSetup,
    evidence: Evidence,
    notes: Sequence[str],
    beside: pd.DataFrame,
) -> Answer:
    """The answer where it does: whom it hit, why, and what mends it."""
    waits, found = waiting(result), verdicts_of(result)
    healthy = is_well(result)
    slow = waits.share < WELL and not found
    cause = "nothing" if healthy else "slow in company" if slow else _cause(found, waits)
    remedy = mending.remedies[0] if mending and mending.remedies and not healthy else None
    five = (
        _what(observed, setup, waits, healthy),
        _whom(observed, waits, healthy, is_drawn(evidence)),
        _slow(result) if slow and not healthy else _why(found, waits, healthy),
        _mends(mending, healthy),
        _trust(likeness, setup),
    )
    rest = [
        *victims(observed, result, waits),
        *verdicts(found, waits),
        *(remedies(mending) if mending and not healthy else ()),
        *over_time(beside),
    ]
    text = document(five, likeness, setup, evidence, notes, rest)
    return Answer(five, text, healthy, True, cause, remedy)


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


def _whom(observed: pd.DataFrame, waits: Waiting, healthy: bool, drawn: bool) -> str:
    failed = observed.index[observed["output_tokens"] == 0].tolist()
    if failed:
        return f"Victims: {names_of(observed, failed)} got no answer."
    if healthy or not waits.victims:
        slowest = int(observed["e2e_ms"].to_numpy(np.float64).argmax())
        took = seconds(observed["e2e_ms"].max() / 1e3)
        who = "as drawn" if drawn else name_of(observed, slowest)
        return f"The slowest, {who}, took {took}."
    worst = victims_of(observed, waits.victims)
    if drawn:
        least = seconds(float(observed["queue_ms"].loc[worst].min()) / 1e3)
        return f"Victims: nothing tells who; of ten requests as drawn one queued {least} or more."
    queued = float(observed["queue_ms"].loc[worst[0]]) / 1e3
    if queued > 0:
        whole = seconds(float(observed["e2e_ms"].loc[worst[0]]) / 1e3)
        most = f"the first of them queued for {seconds(queued)} of its {whole}"
        return f"Victims: {names_of(observed, worst)}; {most}."
    return f"Victims: {names_of(observed, worst)}."


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
    tried = f"{mending.tried} changes tried" + (
        f", {mending.cut_off} of them cut off" if mending.cut_off else ""
    )
    flags = mending.of("flag")
    others = [*mending.of("version"), *mending.of("memory")]
    if not mending.remedies:
        return f"No flag mends it: none of {tried} helps."
    best = mending.remedies[0]
    if not best.sure:
        return f"No flag is sure to mend it; {said(best)} may; {tried}."
    if flags and best.means != "version":
        return f"What mends it: {said(flags[0])}; {tried}."
    if flags and flags[0].sure:
        return f"What mends it: {said(best)}; of the flags {said(flags[0])}; {tried}."
    two = [best, *(one for one in others if one is not best)][:2]
    return f"No flag mends it; {' or '.join(said(one) for one in two)} would; {tried}."


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
