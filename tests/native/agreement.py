"""Compare simkv's schedulers (ports) with the engines' own schedulers on random scenarios.

python -m tests.native.agreement [--cases 300] [--engine vllm] [--out build/agreement.jsonl]

Each line of the output file has the result of one seed, which samples ``CASES_PER_SEED`` scenarios.
A later call continues after the last seed and prints a table over all of them. The exit code is 1
if a decision differs. Needs unpacked wheels in ``SIMKV_WHEELS``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from simkv.conformance.port_comparison import DifferentDecision, compare_with_port
from simkv.core.errors import InputError
from simkv.native.native_engines import NATIVE_ENGINES
from simkv.scenario.custom.code_source import override_trust
from simkv.scenario.native_engine import resolve_sources
from simkv.scenario.scenario import Scenario
from tests.conftest import ROOT
from tests.laws.random_scenarios import scenarios

WHEELS = Path(os.environ.get("SIMKV_WHEELS", ROOT.parent / "wheels"))
#: Releases to compare.
RELEASES = {"vllm": "0.33.0", "sglang": "0.5.23", "trtllm": "5f480b7a6"}
#: Number of scenarios per seed; the first scenario of each seed has the smallest size.
CASES_PER_SEED = 30
#: Events whose numbers of cases are in the table.
EVENTS = (
    "preemptions",
    "evictions",
    "aborts",
    "rejections",
    "waits for an adapter",
    "accepted drafts",
    "copies to or from host memory",
    "disk transfers",
    "crashes",
)
#: Subjects whose numbers of comparisons are in the table.
SUBJECTS = ("tokens", "preempted", "block tables", "blocks held", "free blocks")


@dataclass
class SeedResult:
    """Result of one seed.

    ``cases`` counts the cases by event, and ``total`` counts the comparisons by subject.
    ``refused`` counts the cases with settings that the native engine does not support.
    ``differences`` are texts, one per difference.
    """

    engine: str
    version: str
    seed: int
    scenarios: int = 0
    steps: int = 0
    cases: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


def with_source(scenario: Scenario, source: Path) -> Scenario:
    """Return the scenario with the native engine that runs the code in ``source``."""
    tree: dict[str, Any] = scenario.model_dump(mode="json", exclude_defaults=True)
    tree["engine"]["source"] = str(source)
    resolve_sources(tree, source)
    return Scenario.model_validate(tree)


def compare_seed(engine: str, version: str, source: Path, number: int, count: int) -> SeedResult:
    """Compare port and native engine on ``count`` random scenarios of a seed."""
    result = SeedResult(engine, version, number)

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def agree(data: st.DataObject) -> None:
        sampled = data.draw(scenarios(engine, version))
        if knob := NATIVE_ENGINES[engine].refused(sampled.engine):
            result.refused[knob] += 1
            assume(False)
        scenario = with_source(sampled, source)
        try:
            found = compare_with_port(scenario, source)
        except DifferentDecision as difference:
            text = json.dumps(sampled.model_dump(mode="json", exclude_defaults=True))
            result.differences.append("\n".join([*difference.describe(), text]))
        except InputError as error:
            result.refused[str(error)] += 1
            assume(False)
        else:
            result.scenarios += 1
            result.steps += found.steps
            result.cases.update(name for name, events in found.features.items() if events)
            result.total.update(found.compared)

    with override_trust(True):
        agree()
    return result


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results of earlier calls."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def describe(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of all results of one engine, and the differences."""
    counts = {name: sum(one[name] for one in results) for name in ("scenarios", "steps")}
    cases, total, refused = (
        sum((Counter(one[name]) for one in results), Counter[str]())
        for name in ("cases", "total", "refused")
    )
    differences = [f"seed {one['seed']}: {text}" for one in results for text in one["differences"]]
    first = results[0]
    yield f"{first['engine']} {first['version']}, seeds {[one['seed'] for one in results]}"
    rows = {"scenarios": counts["scenarios"] + len(differences), "different": len(differences)}
    rows |= {f"cases with {name}": cases[name] for name in EVENTS}
    rows |= {"steps": counts["steps"]} | {f"{name} compared": total[name] for name in SUBJECTS}
    rows |= {f"left out, {why}": count for why, count in refused.most_common()}
    yield from (f"  {name:<45} {count:>9,}" for name, count in rows.items())
    yield from differences


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=300, help="scenarios per engine")
    parser.add_argument("--engine", choices=RELEASES, action="append", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("build/agreement.jsonl"))
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    for engine in asked.engine or RELEASES:
        version = RELEASES[engine]
        source = WHEELS / f"{engine}-{version}"
        if not source.is_dir():
            print(f"{engine}: no wheel {source.name} in SIMKV_WHEELS; not compared")
            continue
        done = [one for one in read_results(asked.out) if one["engine"] == engine]
        number = max((one["seed"] for one in done), default=-1)
        while sum(one["scenarios"] + len(one["differences"]) for one in done) < asked.cases:
            number += 1
            line = json.dumps(vars(compare_seed(engine, version, source, number, CASES_PER_SEED)))
            with asked.out.open("a", encoding="utf-8") as out:
                out.write(f"{line}\n")
            done.append(json.loads(line))
        print("\n".join(describe(done)))
        failed |= any(one["differences"] for one in done)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
