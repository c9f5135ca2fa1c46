"""Tests of prices: positions in error messages, and costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.study.plan.plan_cost import compute_cost, find_price, read_prices


def test_reads_prices_from_yaml_and_csv(tmp_path: Path) -> None:
    yaml, table = tmp_path / "prices.yaml", tmp_path / "prices.csv"
    yaml.write_text("H100: 2.5\nL4: 1\n")
    table.write_text("region,gpu,price_per_hour\neast,H100,2.5\neast,L4,1\n")
    assert read_prices(yaml) == read_prices(table) == {"H100": 2.5, "L4": 1.0}
    assert find_price("h100", read_prices(yaml), "prices.yaml") == 2.5
    with pytest.raises(InputError, match=r"prices\.yaml: no price for 'H200'.*H100, L4"):
        find_price("H200", read_prices(yaml), "prices.yaml")
    with pytest.raises(InputError, match=r"no price for 'H100' .*; add one; found: H200"):
        find_price("H100", {"H200": 3.0}, "--gpu-price")


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("p.yaml", "H100: 2\nL4: dear\n", r"p\.yaml:2: L4: .*found 'dear'"),
        ("p.yaml", "H100: -2\n", r"p\.yaml:1: H100"),
        ("p.yaml", "H100: true\n", r"p\.yaml:1: H100"),
        ("p.csv", "gpu,price\nL4,1\n", r"p\.csv:1: column price_per_hour is missing"),
        ("p.csv", "gpu,price_per_hour\nL4,1\nT4,x\n", r"p\.csv:3: price_per_hour: .*found 'x'"),
        ("p.csv", "gpu,price_per_hour\nL4\n", r"p\.csv:2: price_per_hour: .*found None"),
    ],
)
def test_rejects_invalid_prices(tmp_path: Path, name: str, text: str, what: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=what):
        read_prices(path)


def test_rejects_missing_price_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_prices(tmp_path / "nothing.csv")


def test_computes_cost() -> None:
    cost = compute_cost("L4", 3.0, 4, seconds=1800.0, prompt=1_000_000, output=500_000)
    assert cost.per_hour == 12.0
    assert cost.per_million_output_tokens == 12.0
    assert cost.per_million_tokens == 4.0
    assert "(over the makespan of 1,800 s, with the time after the last arrival)" in cost.describe()
    assert compute_cost("L4", 3.0, 4, 1800.0, 0, 0).per_million_tokens is None
