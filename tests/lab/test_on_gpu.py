"""What travels to a machine with a GPU is what is tested here."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT


def test_wheels_are_of_the_versions_that_are_tested():
    pinned = set((ROOT / "constraints.txt").read_text().split())
    lines = (ROOT / "calibrate" / "wheels.txt").read_text().splitlines()
    wheels = {line for line in lines if line and not line.startswith("#")}
    assert wheels <= pinned


def test_the_script_says_how_it_is_used():
    script = ROOT / "calibrate" / "on-gpu.sh"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "on-gpu.sh validate OUT PROFILE" in done.stderr


def test_a_rehearsal_of_the_second_command(tmp_path):
    """With hardly any time it serves what it can, says what is missing, and packs what there is."""
    from tests.lab.test_validate_gpu import PROFILE

    profile = tmp_path / "p.json"
    profile.write_text(PROFILE.model_dump_json(exclude_none=True))
    script = [
        str(ROOT / "calibrate" / "on-gpu.sh"),
        "validate",
        str(tmp_path / "out"),
        str(profile),
    ]
    environment = {**os.environ, "REHEARSE": "1", "PYTHON": sys.executable, "BUDGET": "12"}
    done = subprocess.run(
        script, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"validate.log", "validation.md", "validation.json", "validation.tar.gz"}
