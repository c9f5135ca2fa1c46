"""Tests of the generated pages of rules by release."""

from __future__ import annotations

from pathlib import Path

import pytest

from dev.rules_page import PAGES, render_page
from simkv.schedulers.rule_fields import described_rules


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(root: Path, name: str) -> None:
    page = (root / "docs" / name).read_text(encoding="utf-8")
    assert page == render_page(PAGES[name]), "run `make rules`"


@pytest.mark.parametrize("name", PAGES)
def test_pages_list_every_rule_and_release(name: str) -> None:
    page = PAGES[name]
    text = render_page(page)
    for rule in described_rules(next(iter(page.rules.values()))):
        assert f"- **`{rule}`** (" in text
    for release in page.rules:
        assert f"- **{release}**: " in text
