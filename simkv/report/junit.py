"""Expectations as JUnit XML, which continuous integration reads."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from junitparser import Failure, JUnitXml, TestCase, TestSuite

from simkv.core.errors import InputError
from simkv.measure.expect import Check


def check_target(file: Path) -> None:
    """Raise InputError if ``file`` cannot be written."""
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else "its folder does not exist"
        raise InputError(f"--junit {file}: {what}; expected a file in a folder that exists")


def write_junit(file: Path, scenarios: Mapping[str, Sequence[Check]]) -> None:
    """Write the checks of ``scenarios``, by name, to ``file``: complete or not at all.

    A suite per scenario and a case per variant and figure; a missed one fails and says by how much.
    """
    check_target(file)
    report = JUnitXml("simkv")
    for name, checks in scenarios.items():
        suite = TestSuite(name)
        suite.add_testcases([_case(name, check) for check in checks])
        report.add_testsuite(suite)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent) as scratch:
        new = Path(scratch) / "new"
        report.write(str(new))
        new.replace(file)


def _case(scenario: str, check: Check) -> TestCase:
    case = TestCase(f"{check.figure} {check.expected}", f"{scenario}.{check.variant}", 0.0)
    if not check.ok:
        case.result = [Failure(str(check), "missed")]
    return case
