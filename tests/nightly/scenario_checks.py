"""Run a generated scenario and check the laws of runs (see CONTRIBUTING.md)."""

from __future__ import annotations

import json
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.custom.code_source import override_trust
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from simkv.schedulers.engine_registry import ENGINES
from tests.custom.sample_scheduler import GOOD
from tests.laws.ledger_sums import assert_ledger
from tests.laws.test_fleets import rows
from tests.laws.test_laws import check_blocks
from tests.laws.test_leaping import assert_same
from tests.nightly.scenario_generator import TRACE, generate_scenario

#: Maximum CPU time of one run in seconds.
MAX_CPU_S = 10.0
#: mistral.rs overwrites the block table of a waiting request after an eviction, and the blocks
#: leak.
LEAKS = {("mistralrs", "seed")}


class TooLongError(Exception):
    """A run took more than ``MAX_CPU_S``."""


@dataclass(frozen=True)
class CheckedScenario:
    """Result of a seed: properties of the scenario, and the ``problem`` (a traceback), or None.

    ``cpu_s`` is the CPU time of the run without checks, in seconds.
    """

    seed: int
    engine: str
    variant: str
    options: list[str]
    target: str
    cpu_s: float
    verdict: str
    problem: str | None

    def to_json(self) -> str:
        """Return the result as one line of JSON."""
        return json.dumps(asdict(self))


def prepare_folder(folder: Path) -> Path:
    """Write the files that generated scenarios refer to."""
    shutil.copy(TRACE, folder)
    (folder / "mine.py").write_text(GOOD, encoding="utf-8")
    return folder


def check_seed(seed: int, folder: Path) -> CheckedScenario:
    """Generate the scenario of a seed in a prepared folder, run it and check the laws."""
    with override_trust(yes=True):
        found = generate_scenario(seed, folder)
        engine = found.data["engine"]
        name, variant = engine["name"], engine.get("variant", "")
        cpu, verdict, problem = 0.0, "", None
        try:
            scenario = resolve_variants(YamlDocument(folder / "generated.yaml", found.data))["run"]
            with cpu_limit(MAX_CPU_S):
                start = time.process_time()
                result = run_scenario(scenario, folder)
                cpu = time.process_time() - start
            verdict = str(result.summary["verdict"])
            with cpu_limit(5 * MAX_CPU_S):
                check_laws(scenario, result, folder)
        except InputError as error:
            verdict = f"refused: {str(error).partition(': ')[2][:60]}"
        except Exception:  # each crash is a problem to report
            problem = f"{json.dumps(found.data)}\n{traceback.format_exc()}"
        return CheckedScenario(
            seed, name, variant, found.options, found.target, round(cpu, 3), verdict, problem
        )


def check_laws(scenario: Scenario, result: RunResult, folder: Path) -> None:
    """Check the laws of a run. Raises AssertionError."""
    assert as_bytes(result) == as_bytes(run_scenario(scenario, folder)), "law 4: other bytes"
    assert_same(rows(result), rows(run_scenario(scenario, folder, leaping=False)), "law 5")
    check_outcomes(result)
    if result.fleet is None:
        if scenario.pipeline is None:
            # The custom scheduler gives a reason only for the head of its queue.
            assert_ledger(result.record, with_reasons=scenario.engine.name in ENGINES)
        config = scenario.engine
        if config.name in ENGINES and (config.name, config.variant) not in LEAKS:
            check_blocks(result.run.lifetimes[0].engine.scheduler)


def check_outcomes(result: RunResult) -> None:
    """Check that each request ends once, and that its times and tokens are consistent."""
    figures, lives = result.summary, result.record.requests
    assert sum(figures[one.value] for one in Outcome) == figures["requests"] == len(lives)
    for life in lives.values():
        assert life.outcome in Outcome
        assert life.ended_at is not None
        assert life.tokens >= 0
        if life.tokens > life.request.output_tokens:  # FastDeploy may generate tokens twice
            assert any(f"request {life.request.id} received" in note for note in result.notes)
        times = [t for t in (life.first_token, life.last_token, life.ended_at) if t is not None]
        assert times == sorted(times), "law 3: time runs backwards"
        if life.outcome is Outcome.FINISHED:
            assert life.last_token is not None
    start = list(result.record.steps.start)
    assert result.fleet is not None or start == sorted(start)


def as_bytes(result: RunResult) -> bytes:
    """Return all rows of a run as text."""
    return repr(rows(result)).encode()


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TooLongError inside the block after this CPU time."""

    def stop(*_: Any) -> None:
        raise TooLongError(f"more than {seconds:g} CPU seconds")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
