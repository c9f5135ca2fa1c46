"""A run as one HTML page: words and tables from here, figures drawn by the page itself.

write_html(Path("report.html"), run_file(Path("scenario.yaml")))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from simkv.core.figures import REGISTRY, figure, number, seconds
from simkv.core.files import write_text
from simkv.core.outcome import Outcome, in_words
from simkv.core.version import __version__
from simkv.loop.record import Record
from simkv.measure.expect import check, show
from simkv.measure.metrics import e2e, ttft
from simkv.measure.result import Result
from simkv.report import data, story
from simkv.report.lanes import BARS
from simkv.report.palette import style_sheet
from simkv.report.published import Comparison, compare
from simkv.report.style import FAILED, span
from simkv.scenario.saving import to_yaml
from simkv.why.diagnosis import block_size
from simkv.why.ledger import SERVED, WORDS, Kind, totals

#: Names of what reports have in common, where they share it.
STYLE, SCRIPT, LIBRARY = "report.css", "report.js", "plotly.min.js"
#: The page's own scripts, in the order in which they build on each other.
SCRIPTS = ("model.js", "theme.js", "lanes.js", "figures.js", "main.js")
#: Figures with a time axis, which zoom together.
TIMED = ("lanes", "blocks", "queues")
#: Columns of the table of variants; times are in seconds there.
COLUMNS = (
    "finished",
    "makespan_s",
    "ttft_ms.mean",
    "ttft_ms.p99",
    "e2e_ms.mean",
    "e2e_ms.p99",
    "longest_stall_s",
    "output_throughput",
    "preemptions",
    "recomputed_tokens",
)
SYMBOLS = {"X": "x", "s": "square", "P": "cross", "D": "diamond", ">": "triangle-right"}
CAUSES = {
    "blocks": "too few blocks were free",
    "bucket": "its length was not that of those that run",
    "patience": "the head of the queue had waited too long",
}
CAPTIONS = {
    "lanes": "One lane per request, the first to arrive on top. Point at a lane to see what it "
    "waited for; draw a box to zoom in; arrow keys walk through the requests. Arrows are "
    "preemptions, from the request that they were for to the one that lost its KV.",
    "blocks": "Who holds the cache: the greatest holders by request, and all others. The dashed "
    "line is the whole cache.",
    "queues": "How many requests run and wait, and what a step computes: the mean in each bin of "
    "time, in a band from the least to the most.",
    "ledger": "A mean request's life, from arrival to end, by what it did or waited for.",
    "requests": "The same, request by request in order of arrival.",
    "blockers": "Requests that held the blocks or slots that others waited for, with the part of "
    "that waiting that is due to them.",
    "latency": "The share of all requests that had their first token, and their answer, within a "
    "time. A curve that ends below 100 % leaves the rest without.",
    "published": "Error bars are the rms error of the cost profile over the figures it was "
    "fitted to.",
}


def write_html(
    path: Path,
    results: Mapping[str, Result],
    whatif: Sequence[str] = (),
    *,
    shared: bool = False,
) -> None:
    """Write the report of ``results``, variants by name, to ``path``.

    ``whatif`` are sentences on changes that help, the best first. What all reports have in common
    becomes part of the page, or with ``shared`` lies beside it (see ``write_shared``). The same
    results give the same bytes.
    """
    write_text(path, html(results, whatif, shared=shared))


def write_shared(folder: Path) -> list[Path]:
    """Write what all reports have in common to ``folder``: style, scripts, the plotting library."""
    files = {STYLE: style(), SCRIPT: script(), LIBRARY: library()}
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def html(results: Mapping[str, Result], whatif: Sequence[str] = (), *, shared: bool = False) -> str:
    """The page that ``write_html`` writes."""
    pair = pair_of(results)
    page = columns(results, pair)
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            **_words(results, pair),
            whatif=whatif,
            pair=page["pair"],
            timed=TIMED,
            captions=_captions(results, page),
            beside={"style": STYLE, "script": SCRIPT, "library": LIBRARY} if shared else {},
            style=Markup("" if shared else style()),
            script=Markup("" if shared else script()),
            library=Markup("" if shared else library()),
            data=Markup(_json(page)),
            version=__version__,
        )
    )


def _json(page: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element, whatever it says."""
    return json.dumps(page, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def environment() -> Environment:
    """Templates of this package: everything that is not marked as safe is escaped."""
    return Environment(
        loader=PackageLoader("simkv.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )


def template(name: str) -> str:
    """A file of ``templates`` as it is."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def style() -> str:
    """The style sheet."""
    return style_sheet() + template("style.css")


def script() -> str:
    """The page's own scripts."""
    return "\n".join(template(name) for name in SCRIPTS)


def library() -> str:
    """The plotting library: the cartesian bundle of plotly.js (MIT, see ``vendor``)."""
    path = Path(__file__).parent / "vendor" / "plotly-cartesian-4.1.1.min.js"
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script")


def pair_of(results: Mapping[str, Result]) -> list[str]:
    """The variants that the figures show first: the one to look at, and a better one beside it."""
    lead = story.first_to_look_at(results)
    other = story.remedy(results, lead) or next((name for name in results if name != lead), None)
    return [lead] if other is None else [lead, other]


def columns(results: Mapping[str, Result], pair: Sequence[str]) -> dict[str, Any]:
    """What the scripts draw from."""
    records = {name: result.record for name, result in results.items()}
    end = span(records.values()) or 1.0
    ticks = data.Ticks(end)
    edges = data.bins(end)
    shows = [data.stretches(r.record, r.diagnosis.ledger) for r in results.values()]
    room = data.shares([sum(map(len, lanes.values())) for lanes in shows], data.STRETCHES)
    latencies = [
        life.ended_at - life.request.arrival
        for r in records.values()
        for life in r.lives.values()
        if life.ended_at is not None
    ]
    return {
        "name": next(iter(results.values())).scenario.name,
        "title": title(results),
        "tick": ticks.seconds,
        "end": end,
        "slowest": max([*latencies, 1e-9]),
        "edges": [round(edge, 9) for edge in edges.tolist()],
        "pair": [list(results).index(name) for name in pair],
        "kinds": [
            {"key": code, "served": code in SERVED, "life": code in list(Kind)}
            for code in data.CODES
        ],
        "words": {kind: label for kind, (label, _) in BARS.items()}
        | {kind.value: words for kind, words in WORDS.items()},
        "causes": CAUSES,
        "outcomes": [_outcome(outcome) for outcome in Outcome],
        "vain": [outcome.vain for outcome in Outcome],
        "published": [
            row for comparison in compare(dict(results)) if (row := _error_row(comparison, results))
        ],
        "variants": [
            _variant(name, result, ticks, edges)
            | {
                "lanes": data.lanes(result.record, lanes, ticks, most),
                "arrows": data.arrows(result.record, result.diagnosis, ticks, most // 10),
            }
            for (name, result), lanes, most in zip(results.items(), shows, room, strict=True)
        ],
    }


def _variant(name: str, result: Result, ticks: data.Ticks, edges: data.Floats) -> dict[str, Any]:
    record, found = result.record, result.diagnosis
    lives = list(record.lives.values())
    stop = record.standstill
    sums = totals(interval for lane in found.ledger.values() for interval in lane)
    return {
        "name": name,
        "served": story.served(record),
        "until": span([record]) or 1.0,
        "standstill": None if stop is None else {"kind": stop.kind, "since": stop.since},
        "requests": data.requests(record, ticks),
        "owners": data.owners(record, block_size(result.scenario.engine), edges),
        "courses": data.courses(record, edges),
        "curves": {
            "ttft": data.curve(map(ttft, lives), len(lives)),
            "e2e": data.curve(map(e2e, lives), len(lives)),
        },
        "totals": [data.short(sums.get(kind, 0.0), 9) for kind in Kind] + [0, 0],
        "blockers": [
            [b.id, data.short(b.seconds), data.short(b.block_seconds)] for b in found.blockers[:50]
        ],
        "blocked": data.blocked(record, found),
    }


def _outcome(outcome: Outcome) -> dict[str, str]:
    """How the page says and marks an outcome."""
    mark = FAILED.get(outcome)
    in_vain = "red" if outcome is Outcome.STARVED else "purple"
    return {
        "key": outcome.value,
        "word": outcome.word,
        "label": outcome.label,
        "symbol": SYMBOLS[mark.marker] if mark else "circle",
        "colour": in_vain if mark else "blue",
    }


def _error_row(row: Comparison, results: Mapping[str, Result]) -> dict[str, Any] | None:
    """A published figure with the error of ours in percent, where it has one."""
    if row.error is None:
        return None
    rms = results[row.variant].profile.fit.rms_s
    bar = None
    if rms is not None and row.published and (scale := per_second(row.figure)):
        bar = 100.0 * rms * scale / abs(row.published)
    return {
        "variant": row.variant,
        "figure": row.figure,
        "published": row.published,
        "simulated": row.simulated,
        "error": 100.0 * row.error,
        "bar": bar,
    }


def per_second(name: str) -> float | None:
    """How many units of a published figure are a second; None if it is no time."""
    if metric := REGISTRY.get(name):
        return metric.per_second
    return 1.0 if name.endswith("_s") else None  # of one request


def _words(results: Mapping[str, Result], pair: Sequence[str]) -> dict[str, Any]:
    """What the template says and lists."""
    lead = pair[0]
    result = results[lead]
    other = story.remedy(results, lead)
    about = [_about(part) for part in _by_scenario(results)]
    comparisons = compare(dict(results))
    return {
        "title": title(results),
        "scenarios": about,
        "lead": {
            "name": lead,
            "other": other,
            **badge(result),
            "who": story.who(result.record),
            "behind": story.behind(result.record, result.diagnosis),
            "fix": story.fix(results, lead, other),
            "verdicts": result.diagnosis.verdicts,
        },
        "has_requests": any(found.record.lives for found in results.values()),
        "columns": [REGISTRY[key].heading_s for key in COLUMNS],
        "variants": [
            {
                "name": name,
                **badge(found),
                "cells": [_cell(found, key) for key in COLUMNS],
                "verdicts": found.diagnosis.verdicts,
                "waste": _waste(found),
                "notes": found.notes,
            }
            for name, found in results.items()
        ],
        "accuracy": _accuracy(results),
        "ledger": _ledger_table(results),
        "published": [_published_row(row, results) for row in comparisons],
        "drawn_published": any(row.error is not None for row in comparisons),
        "published_notes": [
            f"{name}: {published.note}"
            for name, found in results.items()
            if (published := found.scenario.published.get(name)) and published.note
        ],
        "checks": [
            (f"{c.variant}: {c.figure}", c.expected, show(c.found), "ok" if c.ok else "missed")
            for c in check(results)
        ],
        "profiles": _profiles(results),
    }


def title(results: Mapping[str, Result]) -> str:
    """The names of the scenarios."""
    return " and ".join(dict.fromkeys(result.scenario.name for result in results.values()))


def _by_scenario(results: Mapping[str, Result]) -> list[dict[str, Result]]:
    """Results of the same scenario together."""
    parts: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        parts.setdefault(result.scenario.name, {})[name] = result
    return list(parts.values())


def _about(results: dict[str, Result]) -> dict[str, Any]:
    scenario = next(iter(results.values())).scenario
    return {
        "name": scenario.name,
        "summary": scenario.summary,
        "report": scenario.report,
        **scenario.provenance.model_dump(),
        "yaml": to_yaml({name: result.scenario for name, result in results.items()}),
    }


def badge(result: Result) -> dict[str, str]:
    """The verdict as a word, with a sign and a tone so that colour is not needed."""
    good = result.summary["verdict"] == "served"
    return {
        "verdict": in_words(result.summary["verdict"]),
        "sign": "✓" if good else "✗",
        "tone": "good" if good else "bad",
    }


def _cell(result: Result, key: str) -> str:
    value = figure(result.summary, key)
    if key == "finished":
        return f"{value:,} of {result.summary['requests']:,}"
    if not result.summary["finished"] and key not in (
        "makespan_s",
        "preemptions",
        "recomputed_tokens",
    ):
        return "none"
    return number(REGISTRY[key].in_s(value))


def _waste(result: Result) -> list[str]:
    """The recompute tax, what was computed for nobody, and who overtook whom."""
    found = result.diagnosis
    waste, said = found.waste, []

    def part(value: float) -> str:
        return f"{seconds(value)}, {100.0 * value / waste.busy:.1f} % of the GPU's time"

    if waste.busy > 0.0:
        if found.recompute_tokens:
            said.append(
                f"Recompute tax: {found.recompute_tokens:,} tokens ({part(waste.recompute)})."
            )
        if waste.gone:
            said.append(f"Computed for clients that had gone: {part(waste.gone)}.")
        if waste.dropped:
            said.append(f"Computed and thrown away: {part(waste.dropped)}.")
    if found.overtakes:
        worst = max(found.worst_overtakes, key=lambda o: (o.seconds, -o.victim), default=None)
        tail = (
            f"; furthest came request {worst.by}, {seconds(worst.seconds)} before request "
            f"{worst.victim}"
            if worst
            else ""
        )
        said.append(f"Served before one that had come earlier: {found.overtakes:,} times{tail}.")
    return said


def _accuracy(results: Mapping[str, Result]) -> str:
    """How far the seconds can be trusted, in a sentence per cost profile."""
    said = ["TTFT and E2E are those of requests that finished."]
    for profile in {r.profile.name: r.profile for r in results.values()}.values():
        known = []
        if profile.fit.rms_s:
            rms = seconds(profile.fit.rms_s)
            known.append(f"± {rms} rms over {profile.fit.points} figures")
        known += [
            f"{kind} steps off by {100 * error.median:.1f} % (median) and {100 * error.p95:.1f} % "
            f"(P95) over {error.points:,} steps that were not fitted to"
            for kind, error in profile.fit.held_out.items()
        ]
        errors = "; ".join(known) or "no error is known"
        said.append(f"Seconds by cost profile {profile.name} ({profile.basis}): {errors}.")
    return " ".join(said)


def _ledger_table(results: Mapping[str, Result]) -> dict[str, Any]:
    sums = {
        name: totals(i for lane in result.diagnosis.ledger.values() for i in lane)
        for name, result in results.items()
    }
    kinds = [kind for kind in Kind if any(part.get(kind) for part in sums.values())]
    return {
        "head": ["variant", *(WORDS[kind] for kind in kinds)],
        "rows": [
            [
                name,
                *(
                    number(part.get(kind, 0.0) / max(len(results[name].record.lives), 1))
                    for kind in kinds
                ),
            ]
            for name, part in sums.items()
        ],
    }


def _published_row(row: Comparison, results: Mapping[str, Result]) -> tuple[str, ...]:
    drawn = _error_row(row, results)
    return (
        f"{row.variant}: {row.figure}",
        row.told,
        "none" if row.simulated is None else f"{row.simulated:.6g}",
        row.verdict,
        f"± {drawn['bar']:.2f} %" if drawn and drawn["bar"] is not None else "",
    )


def _profiles(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """Each cost profile: what it rests on, where it has data, and where this run took it."""
    found = []
    for profile in {r.profile.name: r.profile for r in results.values()}.values():
        records = [r.record for r in results.values() if r.profile.name == profile.name]
        rms = "" if profile.fit.rms_s is None else f", rms error {seconds(profile.fit.rms_s)}"
        rows = []
        for feature, (low, high) in profile.range.items():
            seen = _seen(records, feature)
            here = [number(value) for value in seen] if seen else ["", ""]
            rows.append((feature, number(low), number(high), *here))
        found.append(
            {
                "name": profile.name,
                "text": f"{profile.engine}, {profile.model} on {profile.gpu}: {profile.basis}, "
                f"{profile.fit.points} points{rms}.",
                "note": profile.fit.note,
                "source": profile.source,
                "range": rows,
            }
        )
    return found


def _seen(records: Sequence[Record], feature: str) -> tuple[int, int] | None:
    """The least and greatest value of a feature in the steps that had any."""
    values: set[int] = set()
    for record in records:
        log = record.steps
        if feature in ("prefill_seqs", "prefill_tokens", "decode_seqs"):
            values.update(getattr(log, feature))
        elif feature == "tokens":
            values.update(a + b for a, b in zip(log.prefill_tokens, log.decode_seqs, strict=True))
    values.discard(0)
    return (min(values), max(values)) if values else None


def _captions(results: Mapping[str, Result], page: Mapping[str, Any]) -> dict[str, str]:
    """What stands under the titles of the figures, with what a sample leaves out."""
    captions = dict(CAPTIONS)
    left_out = [
        f"{name}: {len(variant['lanes']['of']):,} of {len(result.record.lives):,} are drawn"
        for (name, result), variant in zip(results.items(), page["variants"], strict=True)
        if len(variant["lanes"]["of"]) < len(result.record.lives)
    ]
    if left_out:
        captions["lanes"] += f" {'; '.join(left_out)}, all kinds of outcomes among them."
    if any(result.diagnosis.preemptions for result in results.values()):
        captions["lanes"] += " Where they are too many for arrows, zoom in."
    return captions
