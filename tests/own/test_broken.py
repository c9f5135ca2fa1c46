"""Broken schedulers, each refused with the law that it breaks, the step and the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simkv
from simkv.scenario.own import laws
from simkv.scenario.own.laws import LawBroken
from tests.own.cases import DECIDES, GOOD, SCENARIO, write

#: By the law: what is put into ``decide`` of a good one, or replaced in it.
BROKEN: dict[str, tuple[str, str, str]] = {
    "raises": ("exceptions", DECIDES, DECIDES + "        {}[3]\n"),
    "exits": ("exceptions", DECIDES, DECIDES + "        raise SystemExit(0)  # {}[3]\n"),
    "computes more than a step may": (
        "limits",
        "            self.compute(batch, r, tokens)\n            budget -= tokens\n",
        "            self.compute(batch, r, tokens)\n",
    ),
    "lets too many run": (
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
        "            left = getattr(frame.f_locals.get('self'), '_left', None)\n"
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


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_refused_by_law_step_and_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    law, where, instead = BROKEN[name]
    monkeypatch.setattr(laws, "PATIENCE", 0.2)
    monkeypatch.setattr(laws, "MOST_IDLE", 300)
    assert where in GOOD
    code = GOOD.replace(where, instead, 1)
    if law == "ends":  # a state that never comes again, so that no circle is seen
        code += "\n    def fingerprint(self):\n        return self.calls\n"
    (tmp_path / "mine.yaml").touch()
    path = write(tmp_path, code, **FIELDS.get(law, {"workload": UNEQUAL}))
    with pytest.raises(LawBroken) as caught:
        simkv.run(path, trust=True)
    assert caught.value.law == law, str(caught.value)
    assert caught.value.step is not None
    assert 1 <= caught.value.line <= len(code.splitlines())
    text = code.splitlines()[caught.value.line - 1]
    assert "def " in text or "{}[3]" in text or "pass" in text or "while" in text or "sort" in text
    assert str(caught.value).startswith(
        f"{tmp_path / 'mine.py'}:{caught.value.line}: breaks the law"
    )


def test_a_good_one_is_not_refused(tmp_path: Path) -> None:
    outcome = simkv.run(write(tmp_path, workload=UNEQUAL), trust=True)
    assert outcome.figures.loc["finished", "run"] == 9
