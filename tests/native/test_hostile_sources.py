"""Tests of sources that fail: the result is one clear line and exit code 2, or a verdict, and no
traceback.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.native.test_native_engine import PRESSURE, run_cli, wheel_of

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
#: Name: text to replace in the scheduler, its replacement, words of the output, and exit code.
PLANTED = {
    "syntax error": ("import itertools\n", "import itertools(\n", "scheduler.py:3: cannot be", 2),
    "import that raises": ("import itertools\n", "import itertools; 1 / 0\n", "ZeroDivision", 2),
    "endless schedule": (
        "        scheduled_new_reqs: list[Request] = []\n",
        "        while True: pass\n",
        "CPU time",
        3,
    ),
    "budget": (
        "        self.max_num_scheduled_tokens = (\n",
        "        vllm_config.scheduler_config.max_num_batched_tokens = 4096\n"
        "        self.max_num_scheduled_tokens = 4096 or (\n",
        "more than max_num_batched_tokens",
        3,
    ),
    "unknown import that decides": (
        "        scheduled_new_reqs: list[Request] = []\n",
        "        import fancy.limits; assert fancy.limits.most() > 3\n"
        "        scheduled_new_reqs: list[Request] = []\n",
        "uses most() of fancy.limits; fancy is not installed",
        3,
    ),
    "unknown module of vLLM that decides": (
        "        scheduled_new_reqs: list[Request] = []\n",
        "        from vllm.utils.brandnew import most; assert most() > 3\n"
        "        scheduled_new_reqs: list[Request] = []\n",
        "uses most() of vllm.utils.brandnew; simkv does not load this module",
        3,
    ),
    "message of two lines": (
        "import itertools\n",
        "import itertools; raise ValueError('one\\ntwo')\n",
        "ValueError: one two",
        2,
    ),
    "unknown import": ("import itertools\n", "import itertools, fancy.limits\n", "served", 0),
}


@pytest.mark.parametrize("name", PLANTED)
def test_hostile_source_ends_with_a_clear_line(tmp_path: Path, name: str) -> None:
    text, planted, words, code = PLANTED[name]
    source = tmp_path / "source"
    wheel = wheel_of("vllm", "0.33.0")
    keep = shutil.ignore_patterns("model_executor", "models", "entrypoints", "kernels")
    shutil.copytree(wheel, source, ignore=keep)
    path = source / SCHEDULER
    before = path.read_text()
    assert text in before
    path.write_text(before.replace(text, planted, 1))
    (tmp_path / "scenario.yaml").write_text(PRESSURE)
    out = str(tmp_path / "out")
    given = ["run", str(tmp_path / "scenario.yaml"), "--source", str(source), "--trust"]
    found, output = run_cli(*given, "--no-plots", "--out", out)
    assert words in " ".join(output.split())
    assert "Traceback" not in output
    assert found == code, output
