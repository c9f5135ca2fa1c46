"""JUnit XML of expectation checks, for continuous integration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from junitparser import Failure, JUnitXml, TestCase, TestSuite

from simkv.core.atomic_files import atomic_file
from simkv.metrics.expectation_checks import ExpectationCheck


def write_junit(file: Path, scenarios: Mapping[str, Sequence[ExpectationCheck]]) -> None:
    """Write the checks of ``scenarios``, by name, to ``file``.

    There is one suite per scenario and one test case per variant and metric. A missed expectation
    is a failure with the difference as its message.
    """
    report = JUnitXml("simkv")
    for name, checks in scenarios.items():
        suite = TestSuite(name)
        suite.add_testcases([_case(name, check) for check in checks])
        report.add_testsuite(suite)
    with atomic_file(file) as new:
        report.write(str(new))


def _case(scenario: str, check: ExpectationCheck) -> TestCase:
    case = TestCase(f"{check.figure} {check.expected}", f"{scenario}.{check.variant}", 0.0)
    if not check.ok:
        case.result = [Failure(str(check), "missed")]
    return case
