"""Tests of JUnit XML for continuous integration, which is written completely or not at all."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from simkv.metrics.expectation_checks import ExpectationCheck
from simkv.report import junit_xml

CHECKS = {
    "first": [
        ExpectationCheck("before", "verdict", "= served", "served", ok=True),
        ExpectationCheck("after", "makespan_s", "<= 3", 4.5, ok=False, missed_by=1.5),
    ],
    "second": [ExpectationCheck("run", "request 1 ttft_s", "= 1", None, ok=False)],
}


def test_has_a_case_per_variant_and_figure(tmp_path: Path) -> None:
    junit_xml.write_junit(tmp_path / "x.xml", CHECKS)
    root = ElementTree.parse(tmp_path / "x.xml").getroot()
    assert root.tag == "testsuites"
    assert [(s.get("name"), s.get("tests"), s.get("failures")) for s in root] == [
        ("first", "2", "1"),
        ("second", "1", "1"),
    ]
    assert [(c.get("classname"), c.get("name")) for c in root.iter("testcase")] == [
        ("first.before", "verdict = served"),
        ("first.after", "makespan_s <= 3"),
        ("second.run", "request 1 ttft_s = 1"),
    ]
    assert [failure.get("message") for failure in root.iter("failure")] == [
        "makespan_s <= 3: found 4.5, missed by +1.5",
        "request 1 ttft_s = 1: found none",
    ]


def test_interrupted_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.xml"
    file.write_text("old")

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(junit_xml.JUnitXml, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        junit_xml.write_junit(file, CHECKS)
    assert [path.name for path in tmp_path.iterdir()] == ["x.xml"]
    assert file.read_text() == "old"
