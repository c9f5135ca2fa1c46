"""Derivatives of a run's latencies with respect to the constants of its cost model.

As long as the engine runs the same steps, the latencies are sums of step costs. The effects of all
constants can therefore be computed from a single run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from simkv.costs.cost_profile import CostProfile
from simkv.sim.run_record import RequestRecord
from simkv.sim.step_log import StepLog

#: Constants of ``costs/operators/calibration_rules.py``, in the order of the derivatives.
FITTED_CONSTANTS = ("prefill", "decode", "prefill_step_s", "step_s", "seq_s", "front_s")
Floats = npt.NDArray[np.float64]


def slopes(logs: Sequence[StepLog], lives: Sequence[RequestRecord], profile: CostProfile) -> Floats:
    """Return the derivatives of mean TTFT (row 0) and mean TPOT (row 1) by fitted constant
    (columns).

    The unit is milliseconds per unit of the constant. If there are several ``logs``, their engines
    run in lockstep.
    """
    found = np.empty((2, len(FITTED_CONSTANTS)))
    steps = _joined(logs)
    times = np.stack([steps["start"], steps["end"]], axis=1).ravel()
    arrival = np.array([life.request.arrival for life in lives])
    first = np.array([life.first_token for life in lives])
    last = np.array([life.last_token for life in lives])
    tokens = np.array([max(life.tokens - 1, 1) for life in lives])
    for column, parts in enumerate(_parts(steps, profile)):
        ends = np.cumsum(parts)
        cumulated = np.stack([ends - parts, ends], axis=1).ravel()
        at = [np.interp(x, times, cumulated) for x in (arrival, first, last)]
        found[0, column] = 1e3 * (at[1] - at[0]).mean()
        found[1, column] = 1e3 * ((at[2] - at[1]) / tokens).mean()
    found[:, -1] = 1e3, 0.0
    return found


def _joined(logs: Sequence[StepLog]) -> dict[str, Floats]:
    """Return the columns of all steps.

    For engines in lockstep, a value is the maximum over the engines.
    """
    names = ("start", "end", "prefill_seqs", "decode_seqs")
    columns = {n: np.concatenate([np.array(getattr(log, n), float) for log in logs]) for n in names}
    if len(logs) == 1:
        return columns
    _, place = np.unique(columns["start"], return_inverse=True)
    joined = {name: np.zeros(place.max() + 1) for name in names}
    for name in names:
        np.maximum.at(joined[name], place, columns[name])
    return joined


def _parts(steps: Mapping[str, Floats], profile: CostProfile) -> list[Floats]:
    """Return the change of each step's duration per unit of each constant except the last."""
    prefills, decodes = steps["prefill_seqs"], steps["decode_seqs"]
    prefilling = prefills > 0
    ones = np.ones(len(prefills))
    units = {"steps": ones, "prefill_seqs": prefills, "decode_seqs": decodes}
    operators = steps["end"] - steps["start"]
    least = sum(term.seconds or 0.0 for term in profile.floor or () if term.when == "prefill")
    launched = prefilling & (operators <= least * (1 + 1e-9))
    for term in profile.terms:  # the host's terms; no factor applies to them
        if term.seconds and term.feature in units:
            where = {"prefill": prefilling, "pure decode": ~prefilling}.get(term.when, ones)
            operators = operators - term.seconds * units[term.feature] * where
    operators = operators * ~launched  # a factor does not change steps limited by the host
    return [
        operators * prefilling,
        operators * ~prefilling,
        prefilling.astype(float),
        ones,
        prefills + decodes,
    ]
