"""Tests of the Triton kernels in Triton's interpreter, without a GPU, and with planted bugs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to interpret")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


cannot_interpret = pytest.mark.skipif(
    version(triton.__version__) < (3, 7, 1) and version(np.__version__) >= (2, 4),
    reason=f"triton {triton.__version__} cannot interpret with numpy {np.__version__}: "
    "numpy < 2.4 or triton >= 3.7.1 is needed",
)


def interpreted(**more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", "tests.gpu.interpret_kernels"]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


@cannot_interpret
def test_interpreted():
    done = interpreted()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model" in done.stdout


#: Original code of the kernels, and a faulty replacement.
BUGS = [
    ("acc = acc * shrink[:, None] + ", "acc = acc + "),
    ("total = total * shrink + ", "total = total + "),
    ("seen = t[None, :] <= position[:, None]", "seen = t[None, :] < position[:, None] + 2"),
    ("there = t < last", "there = t <= last"),
    ("(n - count + token + 1) // TILE", "(n - count + token + QUERIES) // TILE"),
    ("share = tl.exp2(weights - tl.max", "share = tl.exp(weights - tl.max"),
]


@cannot_interpret
def test_bugs_planted_in_the_kernels_are_detected():
    """A bug causes wrong numbers or a read of memory that does not exist; without a bug, no error
    is reported.
    """
    nothing = ("acc = acc * shrink", "acc = acc * shrink")
    done = interpreted(PLANTED=json.dumps([nothing, *BUGS]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("attention") >= 3  # without a planted bug, all comparisons are printed
    told = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    assert told == [["False", *nothing], *(["True", *bug] for bug in BUGS)]
