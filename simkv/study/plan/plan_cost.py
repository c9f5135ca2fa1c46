"""Compute the cost of a plan from a table of prices given by the user.

The table has the price per hour of one GPU, in YAML or CSV. simkv itself has no prices:

    H100: 2.49
    L4: 0.71
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from simkv.core.errors import InputError, spelling_hint
from simkv.core.figure_registry import format_seconds
from simkv.core.input_files import read_text
from simkv.costs.hardware.model_gpu_catalog import known_gpu
from simkv.scenario.yaml_document import YamlDocument, read_document


@dataclass(frozen=True)
class PlanCost:
    """Cost of ``gpus`` GPUs, in the currency of the price table.

    ``per_hour`` is the cost per hour. Costs per million tokens are None if no request was served.
    They are averages over the makespan of the run (``seconds``), which includes the time after the
    last arrival.
    """

    gpu: str
    gpus: int
    per_hour: float
    per_million_output_tokens: float | None
    per_million_tokens: float | None
    seconds: float = 0.0

    def describe(self) -> str:
        """Return the cost as text: GPUs, price per hour, and price per million tokens."""
        tokens = "nothing served"
        if self.per_million_output_tokens is not None and self.per_million_tokens is not None:
            tokens = (
                f"{self.per_million_output_tokens:.4g} per million output tokens, "
                f"{self.per_million_tokens:.4g} per million prompt and output tokens (over the "
                f"makespan of {format_seconds(self.seconds)}, with the time after the last arrival)"
            )
        return f"{self.gpus} x {self.gpu}: {self.per_hour:.4g} per hour, {tokens}"


def read_prices(path: Path) -> dict[str, float]:
    """Return the price per GPU hour by GPU name.

    Raises InputError with file, line and field if a price is invalid.
    """
    if path.suffix.lower() == ".csv":
        return _from_csv(path)
    document = read_document(path)
    return {str(name): _price(document, name) for name in document.tree}


class Prices(NamedTuple):
    """Prices per GPU hour by GPU name, their source, and the name of the selected entry."""

    table: dict[str, float]
    source: str
    label: str | None


def find_prices(prices: str | None, given: Iterable[str]) -> Prices | None:
    """Return the prices of ``FILE`` or ``FILE#NAME``, combined with prices given as ``GPU=PRICE``.

    ``GPU=PRICE`` overrides the file. Returns None if no prices are given. Raises InputError if a
    price is invalid.
    """
    direct = parse_prices(given)
    if prices is None:
        return Prices(direct, "--gpu-price", None) if direct else None
    file, label = split_label(prices)
    return Prices({**read_prices(file), **direct}, str(file), label)


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """Return prices given as ``GPU=PRICE``.

    Raises InputError if a text is invalid.
    """
    prices: dict[str, float] = {}
    for text in texts:
        gpu, _, price = text.rpartition("=")
        try:
            value = float(price)
        except ValueError:
            value = math.nan
        if not gpu or not _is_price(value):
            raise InputError(
                f"--gpu-price {text}: expected a GPU and the price of an hour, such as H100=2.5"
            )
        prices[gpu.strip()] = value
    return prices


def split_label(prices: str) -> tuple[Path, str | None]:
    """Return the file and the entry of ``FILE#NAME``.

    If a file with the whole name exists, return this file and None.
    """
    if Path(prices).exists() or "#" not in prices:
        return Path(prices), None
    file, _, label = prices.rpartition("#")
    return Path(file), label


def _price(document: YamlDocument, name: Any) -> float:
    value = document.tree[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_price(value):
        raise InputError(
            f"{document.place((name,))}: {name}: expected the price of a GPU hour, 0 or more; "
            f"found {value!r}"
        )
    return float(value)


def _from_csv(path: Path) -> dict[str, float]:
    """Read the columns ``gpu`` and ``price_per_hour`` of a CSV file, in any order."""
    text = read_text(path, "utf-8-sig")
    rows = csv.DictReader(StringIO(text))
    missing = {"gpu", "price_per_hour"} - set(rows.fieldnames or ())
    if missing:
        raise InputError(f"{path}:1: column {', '.join(sorted(missing))} is missing")
    prices: dict[str, float] = {}
    for row in rows:
        try:
            price = float(row["price_per_hour"] or "")
        except ValueError:
            price = math.nan
        if not _is_price(price):
            raise InputError(
                f"{path}:{rows.line_num}: price_per_hour: expected a number, 0 or more; "
                f"found {row['price_per_hour']!r}"
            )
        prices[row["gpu"]] = price
    return prices


def _is_price(value: float) -> bool:
    return 0 <= value < math.inf


def find_price(gpu: str, prices: dict[str, float], path: str) -> float:
    """Return the price per hour of a GPU.

    Raises InputError if the prices do not contain the GPU.
    """
    by_name = {_one_name(name): price for name, price in prices.items()}
    if _one_name(gpu) in by_name:
        return by_name[_one_name(gpu)]
    another = "" if path == "--gpu-price" else ", or select another entry as FILE#NAME"
    raise InputError(
        f"{path}: no price for {gpu!r}{spelling_hint(gpu, prices)}; add one{another}; found: "
        f"{', '.join(prices) or 'no prices'}"
    )


def _one_name(gpu: str) -> str:
    """Return the name of a GPU in the GPU catalog, or else its name in lower case."""
    known = known_gpu(gpu)
    return known.name if known else gpu.casefold()


def compute_cost(
    gpu: str, per_gpu_hour: float, gpus: int, seconds: float, prompt: int, output: int
) -> PlanCost:
    """Return the cost of ``gpus`` GPUs that processed the given tokens in ``seconds``."""
    per_hour = per_gpu_hour * gpus
    spent = per_hour * seconds / 3600.0

    def per_million(tokens: int) -> float | None:
        return 1e6 * spent / tokens if tokens else None

    return PlanCost(gpu, gpus, per_hour, per_million(output), per_million(prompt + output), seconds)
