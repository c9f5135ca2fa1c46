"""Tests of broken schedulers: `check-scheduler` names law, step and line, and a run ends with a
verdict.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import simkv
from simkv.core.scheduler_protocol import Batch, Completion
from simkv.metrics.purity_check import check_scheduler_run
from simkv.scenario.custom import call_limit, request_tracking
from simkv.scenario.custom.code_source import override_trust
from simkv.scenario.custom.scheduler_laws import LawViolation
from simkv.scenario.scenario_loader import load
from tests.custom.sample_scheduler import (
    DECIDES,
    GOOD,
    SCENARIO,
    write,
)

#: Statements by the law that they break; each is added to ``decide`` of a correct scheduler, or
#: replaces a statement there.
BROKEN: dict[str, tuple[str, str, str]] = {
    "raises": ("exceptions", DECIDES, DECIDES + "        {}[3]\n"),
    "exits": ("exceptions", DECIDES, DECIDES + "        raise SystemExit(0)  # {}[3]\n"),
    "computes more than a step may": (
        "limits",
        "            self.compute(batch, r, tokens)\n            budget -= tokens\n",
        "            self.compute(batch, r, tokens)\n",
    ),
    "runs too many requests": (
        "limits",
        "if len(self.running) == self.config.max_num_seqs:",
        "if False:",
    ),
    "reads the trace": (
        "future",
        DECIDES,
        DECIDES + "        with open(__file__.replace('.py', '.yaml')) as file:\n"
        "            file.read()\n",
    ),
    "answers with nothing": (
        "answers",
        "    def decide",
        "    def schedule(self):\n        return None\n\n    def decide",
    ),
    "never answers": (
        "answers",
        DECIDES,
        DECIDES + "        while len(self.waiting) > 1:\n            pass\n",
    ),
    "loses blocks": (
        "blocks",
        DECIDES,
        DECIDES + "        if self.running:\n            self.pool.abandon(self.running[0].id)\n",
    ),
    "computes without blocks": (
        "blocks",
        "    def decide",
        "    def blocks(self, r, tokens):\n        return 0\n\n    def decide",
    ),
    "schedules twice": (
        "requests",
        "            self.compute(batch, r, tokens)\n            budget -= tokens\n",
        "            self.compute(batch, r, tokens)\n            budget -= tokens\n"
        "            batch.scheduled.append((r.id, 1))\n"
        "            batch.context.append(r.computed)\n",
    ),
    "forgets a request": (
        "requests",
        DECIDES,
        DECIDES + "        if len(self.waiting) == 3:\n            self.waiting.pop()\n",
    ),
    "sends tokens early": (
        "tokens",
        "            tokens = min(r.left, budget)\n            if len",
        "            tokens = min(max(r.left - 1, 1), budget)\n"
        "            batch.emits.append(r.id)\n            if len",
    ),
    "asks for the future": (
        "future",
        DECIDES,
        DECIDES + "        self.waiting.sort(key=lambda r: r.prompt.output_tokens)\n",
    ),
    "finds the future by a back door": (
        "future",
        DECIDES,
        "        import sys\n"
        "        frame, left = sys._getframe(), None\n"
        "        while left is None:\n"
        "            left = getattr(frame.f_locals.get('self'), '_remaining', None)\n"
        "            frame = frame.f_back\n"
        "        self.waiting.sort(key=lambda r: left[r.id])\n" + DECIDES,
    ),
    "throws dice": (
        "chance",
        DECIDES,
        "        import random\n        random.shuffle(self.waiting)\n" + DECIDES,
    ),
    "forgets to count in a leap": (
        "leaps",
        "    def decide",
        "    calls = 0\n\n"
        "    def schedule(self):\n"
        "        self.calls += 1\n"
        "        waiting = self.waiting\n"
        "        if self.calls % 7:\n"
        "            self.waiting = []\n"
        "        batch = super().schedule()\n"
        "        self.waiting = waiting\n"
        "        return batch\n\n"
        "    def leap(self, most):\n"
        "        return most\n\n"
        "    def skip(self, steps):\n"
        "        free = []\n"
        "        for _ in range(steps):\n"
        "            for r in self.running:\n"
        "                self.pool.take(r.id, self.blocks(r, 1))\n"
        "                r.computed += 1\n"
        "                r.emitted += 1\n"
        "            free.append(self.pool.free)\n"
        "        return free\n\n    def decide",
    ),
    "never does anything": (
        "ends",
        DECIDES,
        "        self.calls = getattr(self, 'calls', 0) + 1\n        return\n" + DECIDES,
    ),
}
ROOMY = {
    "engine": {**SCENARIO["engine"], "num_blocks": 200},
    "workload": {
        "burst": {"num_prompts": 5, "prompt_tokens": 9, "output_tokens": 40, "interval": 11}
    },
}
UNEQUAL: dict[str, Any] = {
    "requests": [
        {"prompt_tokens": 40 + i, "output_tokens": 3 + (7 * i) % 11, "max_tokens": 64}
        for i in range(9)
    ]
}


NARROW = {
    "engine": {
        **SCENARIO["engine"],
        "num_blocks": 200,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 60,
    },
    "workload": UNEQUAL,
}
FIELDS = {"leaps": ROOMY, "limits": NARROW}


#: Faults that are detected during a run because the engine cannot continue. The other faults need
#: `check-scheduler`.
ENDS_A_RUN = {
    "raises": "raised KeyError: 3",
    "exits": "raised SystemExit: 0",
    "answers with nothing": "schedule at decision 1: found None, expected a Batch",
    "never answers": "used more than 0.2 s of CPU",
    "computes without blocks": "blocks, but only 20 exist",
    "schedules twice": "is listed 2 times in one step, expected once",
    "sends tokens early": "gets a token before its prompt is complete",
    "asks for the future": "'Prompt' object has no attribute 'output_tokens'",
    "never does anything": "consecutive decisions produced no token",
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limit, "CPU_SECONDS", 0.2)
    monkeypatch.setattr(call_limit, "TICK", 0.05)
    monkeypatch.setattr(request_tracking, "MOST_IDLE", 300)


def broken(name: str, folder: Path) -> tuple[Path, str]:
    """Write the scenario and code of a broken scheduler."""
    law, where, instead = BROKEN[name]
    assert where in GOOD
    code = GOOD.replace(where, instead, 1)
    if law == "ends":  # the state never repeats, so no cycle is detected
        code += "\n    def fingerprint(self):\n        return self.calls\n"
    (folder / "mine.yaml").touch()
    return write(folder, code, **FIELDS.get(law, {"workload": UNEQUAL})), code


def check_run(path: Path) -> None:
    with override_trust(True):
        check_scheduler_run(load(path)["run"], path.parent)


@pytest.mark.parametrize("name", BROKEN)
def test_check_names_law_step_and_line(name: str, tmp_path: Path) -> None:
    path, code = broken(name, tmp_path)
    with pytest.raises(LawViolation) as caught:
        check_run(path)
    assert caught.value.law == BROKEN[name][0], str(caught.value)
    assert caught.value.step is not None
    assert 1 <= caught.value.line <= len(code.splitlines())
    text = code.splitlines()[caught.value.line - 1]
    assert "def " in text or "{}[3]" in text or "pass" in text or "while" in text or "sort" in text
    assert str(caught.value).startswith(
        f"{tmp_path / 'mine.py'}:{caught.value.line}: violates the invariant"
    )


@pytest.mark.parametrize("name", BROKEN)
def test_run_ends_with_verdict_or_serves_all(name: str, tmp_path: Path) -> None:
    path, _ = broken(name, tmp_path)
    result = simkv.run(path, trust=True).results["run"]
    verdicts = {one.name: one.text for one in result.diagnosis.verdicts}
    assert all(life.outcome is not None for life in result.record.requests.values())
    if name not in ENDS_A_RUN:
        assert "engine died" not in verdicts
        return
    text = verdicts["engine died"]
    assert ENDS_A_RUN[name] in text
    file = tmp_path / "mine.py"
    assert text.endswith(f"; run simkv check-scheduler {file}")
    assert f"{file}:" in text


def test_call_timer_kills_no_process() -> None:
    """The timer does not kill a process that ends while the timer runs."""
    code = (
        "import time; from simkv.scenario.custom import call_limit; call_limit.TICK = 0.05\n"
        "class Slow:\n    def __del__(self, sleep=time.sleep): sleep(0.2)\n"
        "slow = Slow(); call_limit.call_in_time(lambda: None)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


#: Returned instead of the expected value.
JUNK = [
    "None", "-1", "10**12", "'x'", "[99]", "[(0, 0)]", "[(0, 'x')]", "{0: None}",
    "(0, 'nothing')", "[0, 0]", "print",
]  # fmt: skip
RETURNS_JUNK = """

class Junk(Mine):
    calls = 0

    def schedule(self):
        batch = super().schedule()
        Junk.calls += 1
        if Junk.calls == 3 and FIELD in Batch.__slots__:
            setattr(batch, FIELD, JUNK)
        return batch

    def complete(self, batch, ended):
        completion = super().complete(batch, ended)
        if Junk.calls == 3 and FIELD in Completion.__slots__:
            setattr(completion, FIELD, JUNK)
        return completion


def junk(name):
    right = getattr(Mine, name)
    is_property = isinstance(right, property)

    def call(self, *args):
        if Junk.calls >= 3:
            return JUNK
        return right.fget(self) if is_property else right(self, *args)

    return property(call) if is_property else call


if hasattr(Mine, FIELD) and FIELD != "pipeline_depth":
    setattr(Junk, FIELD, junk(FIELD))
del Mine
"""
METHODS = [
    "schedule", "complete", "leap", "skip", "num_blocks", "free_blocks", "num_waiting",
    "num_running", "waiting_ids", "running_ids", "blocks_held", "fingerprint",
]  # fmt: skip


@pytest.mark.parametrize("field", [*Batch.__slots__, *Completion.__slots__, *METHODS])
def test_invalid_results_cause_no_traceback(field: str, tmp_path: Path) -> None:
    """A decision, a completion or every call returns an invalid value."""
    good = GOOD.replace("import Batch,", "import Completion, Batch,")
    for junk in JUNK:
        code = RETURNS_JUNK.replace("FIELD", repr(field)).replace("JUNK", junk)
        fields = {"workload": {"requests": UNEQUAL["requests"][:4]}, "timeout": 60}
        result = simkv.run(write(tmp_path, good + code, **fields), trust=True).results["run"]
        assert all(life.outcome is not None for life in result.record.requests.values())
        json.dumps(result.summary)
        for verdict in result.diagnosis.verdicts:
            assert verdict.text


def test_accepts_correct_scheduler(tmp_path: Path) -> None:
    path = write(tmp_path, workload=UNEQUAL)
    check_run(path)
    assert simkv.run(path, trust=True).figures.loc["finished", "run"] == 9
