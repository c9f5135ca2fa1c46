"""Fit step costs to the steps that a server logs.

A logged step has numbers of sequences and tokens, and a duration. The number of KV tokens that its
decodes read is derived from the cache usage, which is interpolated if the line does not report it.
Without the column ``prefill_context``, each chunk is treated as the first chunk of its prompt.
"""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from simkv.costs.sources.single_request_fit import MIXED_DECODE_FACTOR
from simkv.incident.initial_costs import CONTEXT_PER_STEP, PAIRS_PER_TOKEN, CostPrior
from simkv.incident.step_costs import UNIT_COST_NAMES, UnitCosts, matrix_product_seconds

Floats = npt.NDArray[np.float64]
#: Minimum number of lines for a fit, and the number above which lines are sampled.
MIN_STEP_LINES, MAX_STEP_LINES = 12, 20_000
#: Relative error of a step, and uncertainty of costs that were fitted to many steps.
STEP_SCATTER, COST_SIGMA = 0.03, 0.05


def with_context(steps: pd.DataFrame, series: pd.DataFrame | None, tokens: float) -> pd.DataFrame:
    """Return the steps with a column ``context``: the KV tokens read by decodes.

    ``tokens`` is the capacity of the KV cache in tokens.
    """
    usage = steps["usage"].to_numpy(np.float64)
    if np.isnan(usage).any() and series is not None and series["usage"].notna().any():
        known = series.dropna(subset=["usage"]).sort_values("t_s")
        near = np.interp(steps["t_s"], known["t_s"], known["usage"])
        usage = np.where(np.isnan(usage), near, usage)
    held = np.nan_to_num(usage) * tokens - steps["prefill_tokens"]
    context = np.where(steps["decode_seqs"] > 0, np.maximum(held, 0.0), 0.0)
    return steps.assign(context=context)


def has_enough_steps(steps: pd.DataFrame | None) -> bool:
    """Return whether there are enough logged steps for a fit."""
    return steps is not None and len(steps) >= MIN_STEP_LINES


def fit_unit_costs(
    steps: pd.DataFrame, aims: dict[str, CostPrior] | None = None
) -> tuple[UnitCosts, Floats, npt.NDArray[np.bool_]]:
    """Fit unit costs to logged steps. One step in four is held out.

    Return the costs, log(fitted / measured duration) of each held-out step, and whether it contains
    a prefill.
    """
    drawn = steps if len(steps) <= MAX_STEP_LINES else steps.sample(MAX_STEP_LINES, random_state=0)
    columns = ("prefill_tokens", "decode_seqs", "context", "seconds")
    prefill, decodes, context, seconds = (drawn[name].to_numpy(np.float64) for name in columns)
    prefills = prefill > 0
    before = drawn["prefill_context"].to_numpy(np.float64) if "prefill_context" in drawn else 0.0
    seqs = np.maximum(drawn["prefill_seqs"].to_numpy(np.float64), 1)
    pairs = prefill * (prefill / 2 + before) / seqs
    good = (seconds > 0) & (prefills | (decodes > 0))
    kept = good & (np.arange(len(drawn)) % 4 != 3)

    def cost(prices: UnitCosts) -> Floats:
        pure = prices.decode_step + prices.decode_seq * decodes
        mixed = matrix_product_seconds(prefill + decodes, prices) + prices.pair * pairs
        beside = np.where(prefills, MIXED_DECODE_FACTOR, 1.0) * prices.context * context
        return np.asarray(np.where(prefills, mixed, pure) + beside)

    begin, centre, sigma = _start(seconds[good], prefills[good], prefill[good], aims)

    def errors(logs: Floats) -> Floats:
        apart = np.log(cost(UnitCosts(*np.exp(logs).tolist())) / np.maximum(seconds, 1e-9))
        return np.concatenate([apart[kept] / STEP_SCATTER, (logs - centre) / sigma])

    found = least_squares(errors, begin, loss="soft_l1", f_scale=2.0, max_nfev=100)
    prices = UnitCosts(*np.exp(found.x).tolist())
    left = good & ~kept
    with np.errstate(divide="ignore"):
        apart = np.log(cost(prices) / np.where(seconds > 0, seconds, np.nan))
    return prices, np.asarray(apart[left]), prefills[left]


def _start(
    seconds: Floats,
    prefills: npt.NDArray[np.bool_],
    tokens: Floats,
    aims: dict[str, CostPrior] | None,
) -> tuple[Floats, Floats, Floats]:
    """Return the start values, priors and uncertainties of the fit.

    All values are logarithms, in the order of the unit costs.
    """
    pure = seconds[~prefills]
    step = float(np.quantile(pure, 0.1)) if len(pure) else float(np.quantile(seconds, 0.1))
    many = prefills & (tokens > np.quantile(tokens[prefills], 0.5)) if prefills.any() else prefills
    token = float(np.median(seconds[many] / tokens[many])) if many.any() else step / 300
    plain = {
        "decode_step": (step, 3.0),
        "prefill_step": (0.2 * step, 1.0),
        "decode_seq": (step / 300, 2.0),
        "token": (token, 3.0),
        "pair": (token / PAIRS_PER_TOKEN[0], PAIRS_PER_TOKEN[1]),
        "context": (step / CONTEXT_PER_STEP[0], CONTEXT_PER_STEP[1]),
        "power": (3.0, 0.7),
    }
    for name, likely in (aims or {}).items():
        if likely.sigma < plain[name][1]:
            plain[name] = (likely.price, likely.sigma)
    centre = np.log(np.array([plain[name][0] for name in UNIT_COST_NAMES]))
    begin = centre.copy()
    return begin, centre, np.array([plain[name][1] for name in UNIT_COST_NAMES])


def costs_as_priors(prices: UnitCosts) -> dict[str, CostPrior]:
    """Return fitted unit costs as priors for a fit to request times, by name of the cost."""
    return {
        name: CostPrior(price, COST_SIGMA)
        for name, price in zip(UNIT_COST_NAMES, astuple(prices), strict=True)
    }
