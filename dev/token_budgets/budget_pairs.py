"""Errors of profiles that were fitted at one token budget and used at another, for every pair of
budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dev.token_budgets.known_devices import Device, of_tables, planted
from dev.token_budgets.made_loads import alone_on, load_for, served
from simkv.costs.cost_profile import CostProfile, FitQuality, StepCost
from simkv.costs.sources.single_request import compute_model_traits
from simkv.costs.sources.single_request_fit import fit_cost_coefficients, make_cost_terms
from simkv.validation.figure_comparison import markdown

BUDGETS = (64, 256, 1024, 4096)


@dataclass(frozen=True)
class Pair:
    """Relative error of the mean E2E under load at budget ``asked``.

    The profile was fitted to requests in isolation at budget ``fitted``.
    """

    device: str
    fitted: int
    asked: int
    error: float


def pairs_of(device: Device, budgets: Sequence[int] = BUDGETS) -> Iterator[Pair]:
    """Yield all pairs of budgets on a device, including pairs of equal budgets."""
    fits = {budget: _fitted(device, budget) for budget in budgets}
    for asked in budgets:
        sent = load_for(device, asked)
        real, _ = served(device.cost, asked, sent)
        for fitted, cost in fits.items():
            found, _ = served(cost, asked, sent)
            yield Pair(device.name, fitted, asked, found / real - 1.0)


def made(folders: Iterable[Path]) -> Iterator[Pair]:
    """Yield all pairs on devices with made-up costs, and on devices of the kernel tables in some
    folders.
    """
    for device in (*planted(), *(d for folder in folders for d in of_tables(folder))):
        yield from pairs_of(device)


def _fitted(device: Device, budget: int) -> StepCost:
    shape = compute_model_traits(device.model, budget, tensor_parallel=device.tensor_parallel)
    prices = fit_cost_coefficients(alone_on(device, budget), shape, device.gpu)
    return StepCost(
        CostProfile(
            name=f"{device.name} at {budget}",
            engine="made",
            model=device.model.name,
            gpu=device.gpu.name,
            basis="measured",
            terms=make_cost_terms(prices, shape),
            idle_pass_s=1e-4,
            range={},
            fit=FitQuality(points=0),
            source=["made"],
        )
    )


def table(found: Iterable[Pair]) -> list[str]:
    """Return a Markdown table of errors in percent, as lines.

    It has one row per device and predicted budget, and one column per fitted budget.
    """
    rows: dict[tuple[str, int], dict[int, float]] = {}
    for pair in found:
        rows.setdefault((pair.device, pair.asked), {})[pair.fitted] = pair.error
    budgets = sorted({fitted for errors in rows.values() for fitted in errors})
    head = ["device", "asked for", *(f"fitted at {budget:,}" for budget in budgets)]
    lines = (
        [device, f"{asked:,}", *(f"{100 * errors[fitted]:+.1f}" for fitted in budgets)]
        for (device, asked), errors in rows.items()
    )
    return list(markdown(head, lines, 1))


def near(found: Sequence[Pair], within: float = 0.05) -> str:
    """Return a sentence with the number of predictions for other budgets with an error
    below ``within``.
    """
    apart = [pair for pair in found if pair.fitted != pair.asked]
    good = sum(abs(pair.error) < within for pair in apart)
    return (
        f"{good} of {len(apart)} predictions for other budgets than the fitted one are within "
        f"{100 * within:g} %"
    )
