"""Fit step costs without a GPU, so that the simulation reproduces the measured times of an
incident.

In each round, the scenario is simulated, and the unit costs are adjusted to the measured prefill
times and times per token, with unchanged batches. The costs of the best round are returned. The fit
minimizes relative errors with a soft L1 loss, which gives outliers less weight. The expected costs
for the GPU and the model are priors. One request in four is held out for the errors of the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from simkv.core.request import Request
from simkv.costs.cost_profile import CostProfile, FitQuality
from simkv.costs.hardware.model_gpu_catalog import known_gpu, known_model
from simkv.costs.held_out_errors import summarize_errors_by_kind
from simkv.costs.sources.single_request import ModelTraits, compute_model_traits
from simkv.costs.sources.single_request_fit import BATCH_DOUBLING_ERROR
from simkv.incident.evidence import UndeterminedError
from simkv.incident.fixed_schedule import FixedSchedule
from simkv.incident.incident_simulation import request_times
from simkv.incident.initial_costs import CostPrior, cost_priors, guess_unit_costs
from simkv.incident.logged_step_costs import costs_as_priors, fit_unit_costs, has_enough_steps
from simkv.incident.server_setup import MIN_QUEUE_S, ServerSetup
from simkv.incident.step_costs import UNIT_COST_NAMES, UnitCosts, cost_terms
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.simulation import ScenarioRun, simulate_with_profile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: Relative errors that no fit removes: the error of a single request's time, and the error of a
#: mean over all requests, which hardly depends on the order of requests.
REQUEST_SCATTER, MEAN_SCATTER = 0.05, 0.01
#: Every N-th request is held out of the fit.
HOLDOUT_EVERY = 4
#: Maximum numbers of fitted requests and of simulations. Requests sampled from log lines contain
#: less information, so fewer simulations suffice for them.
MAX_FITTED_REQUESTS, ROUNDS, SAMPLED_ROUNDS = 1000, 8, 3
#: Number of segments that are fitted if there are more requests, and the fraction of each segment
#: that only warms up the server.
SEGMENTS, WARM_UP_SHARE = 5, 0.25
#: Factors on the guessed size of the KV cache; these sizes are also tried.
CACHE_SIZE_FACTORS = (0.88, 0.94, 1.06)
#: Minimum number of output tokens of a request whose decode steps are fitted.
MIN_OUTPUT_TOKENS = 4


@dataclass(frozen=True)
class ObservedTimes:
    """Measured prefill time and time per token of each request, in seconds (NaN if unknown).

    ``with_queue`` is true if queue times are unknown. The TTFT then replaces the prefill time.
    """

    prefill: Floats
    decode: Floats
    whole: Floats
    with_queue: bool

    @staticmethod
    def of(observed: pd.DataFrame, *, prefills: bool = True) -> ObservedTimes:
        """Return the measured times of requests. Without ``prefills``, all prefill times are
        NaN.
        """
        with_queue = bool(observed["queue_ms"].isna().all())
        prefill = observed["prefill_ms"]
        if prefill.isna().all():
            prefill = observed["ttft_ms"] - observed["queue_ms"].fillna(0.0)
        decode = observed["tpot_ms"].where(observed["output_tokens"] >= MIN_OUTPUT_TOKENS)
        columns = (prefill, decode, observed["e2e_ms"])
        first, later, whole = (column.to_numpy(np.float64) / 1e3 for column in columns)
        if not prefills:
            first = np.full(len(observed), np.nan)
        return ObservedTimes(first, later, whole, with_queue)

    def beside(self, simulated: pd.DataFrame) -> tuple[Floats, Floats]:
        """Return log(simulated / measured) of each request's prefill time and time per token."""
        prefill = simulated["ttft_ms" if self.with_queue else "prefill_ms"].to_numpy(np.float64)
        decode = simulated["tpot_ms"].to_numpy(np.float64)
        return _log(prefill / 1e3, self.prefill), _log(decode / 1e3, self.decode)

    def means(self, simulated: pd.DataFrame, kept: npt.NDArray[np.bool_]) -> Floats:
        """Return log(simulated / measured) of the mean E2E latency and of the mean time per token.

        Only requests for which ``kept`` is true are included.
        """
        found = []
        for name, seen in (("e2e_ms", self.whole), ("tpot_ms", self.decode)):
            found.append(_mean_log(simulated[name].to_numpy(np.float64) / 1e3, seen, kept))
        return np.array(found)


def _soft(errors: Floats) -> Floats:
    """Return the soft L1 loss of each error, which is linear for large errors."""
    return np.asarray(2 * (np.sqrt(1 + (errors / 2) ** 2) - 1) * 2)


def _mean_log(made: Floats, seen: Floats, kept: npt.NDArray[np.bool_]) -> float:
    """Return log(mean of ``made`` / mean of ``seen``) over the selected requests with both
    values.
    """
    both = kept & np.isfinite(made) & np.isfinite(seen)
    return float(_log(made[both].mean(), seen[both].mean())) if both.any() else 0.0


def _log(simulated: Floats, measured: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(simulated / measured))


class FittedIncident(NamedTuple):
    """Profile and scenario that reproduce the observed times.

    ``run`` is the simulation of all requests, or None.
    """

    profile: CostProfile
    scenario: Scenario
    run: ScenarioRun | None


def calibrate_incident(
    scenario: Scenario,
    requests: Sequence[Request],
    observed: pd.DataFrame,
    setup: ServerSetup,
    steps: pd.DataFrame | None = None,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
    *,
    of_lines: bool = False,
) -> FittedIncident:
    """Return the profile that reproduces the observed times, and the scenario.

    An unknown size of the KV cache is fitted as well. ``steps`` contains the logged steps, if any.
    ``of_lines`` is true if the requests were sampled from log lines. ``tell`` receives the number
    of finished simulations and the total. Raises UndeterminedError if there are no measured times.
    """
    budget = getattr(scenario.engine, "max_num_batched_tokens", 0) or 8192
    shape, gpu = _shape(setup, budget), known_gpu(setup.gpu or "")
    front = _front(observed)
    timed = not observed.dropna(subset=["ttft_ms", "e2e_ms"]).empty
    if steps is not None and has_enough_steps(steps):
        guess, errors, prefills = fit_unit_costs(steps)
        if not timed or of_lines:
            profile = build_profile_of_steps(guess, errors, prefills, shape, len(steps))
            name = f"{setup.engine['name']} as logged"
            server = {"model": setup.model or "unknown", "gpu": setup.gpu or "unknown"}
            return FittedIncident(
                profile.model_copy(update={"name": name, **server}), scenario, None
            )
        aims = costs_as_priors(guess)
    elif timed:
        guess = guess_unit_costs(observed, budget)
        aims = cost_priors(guess, shape, gpu)
    else:
        raise UndeterminedError(
            "step costs cannot be fitted: for no request, the inputs contain both the time of "
            "the first token and the time of the last token, and they contain no steps"
        )
    sizes = _sizes(scenario, observed, setup)
    total = len(observed)
    rows, warm_up = choose_fitted_rows(total)
    observed = observed.iloc[rows].reset_index(drop=True)
    requests = [replace(requests[row], id=place) for place, row in enumerate(rows.tolist())]
    measured = ObservedTimes.of(observed, prefills=not of_lines)
    fitters = [
        _Fitter(one, requests, observed, measured, shape, front, aims, tell, warm_up)
        for one in sizes
    ]
    rounds = SAMPLED_ROUNDS if of_lines else ROUNDS
    found = [fitter.fitted(_between(guess, aims), rounds) for fitter in fitters]
    best = min(range(len(found)), key=lambda place: found[place].missed)
    run = found[best].run if len(rows) == total else None
    return FittedIncident(fitters[best].profile(found[best], setup), sizes[best], run)


def choose_fitted_rows(count: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the rows of the requests to simulate, and a mask of warm-up requests.

    Warm-up requests are simulated but not fitted. If there are more than ``MAX_FITTED_REQUESTS``
    requests, only some groups of successive requests are simulated.
    """
    if count <= MAX_FITTED_REQUESTS:
        return np.arange(count), np.zeros(count, bool)
    size = MAX_FITTED_REQUESTS // SEGMENTS
    starts = np.linspace(0, count - size, SEGMENTS).astype(np.int64)
    rows = np.concatenate([np.arange(start, start + size) for start in starts])
    place = np.arange(len(rows))
    return rows, (place >= size) & (place % size < WARM_UP_SHARE * size)


def _sizes(scenario: Scenario, observed: pd.DataFrame, setup: ServerSetup) -> list[Scenario]:
    """Return the scenarios to fit: one with the given cache size, or several with likely sizes."""
    if not setup.guessed or not (observed["queue_ms"] > 1e3 * MIN_QUEUE_S).any():
        return [scenario]
    spec = find_engine_spec(scenario.engine)
    size, block = getattr(scenario.engine, spec.memory), spec.block_size(scenario.engine)
    unit = block if spec.memory_in_tokens else 1
    found = [scenario]
    for factor in CACHE_SIZE_FACTORS:
        try:
            engine = replace(scenario.engine, **{spec.memory: int(size * factor) // unit * unit})
        except ValueError:
            continue
        found.append(scenario.model_copy(update={"engine": engine}))
    return found


def _shape(setup: ServerSetup, budget: int) -> ModelTraits | None:
    model = known_model(setup.model or "")
    return compute_model_traits(model, budget, tensor_parallel=setup.tp) if model else None


def _front(observed: pd.DataFrame) -> float:
    """Return the time in seconds before a request reaches the engine core: TTFT - queue -
    prefill.
    """
    if "prefill_ms" not in observed:
        return 0.0
    front = (observed["ttft_ms"] - observed["queue_ms"] - observed["prefill_ms"]).median()
    return max(float(front) / 1e3, 0.0) if np.isfinite(front) else 0.0


def _between(guess: UnitCosts, aims: dict[str, CostPrior]) -> UnitCosts:
    """Return the start value of each cost: the mean of its prior if it is precise, or else the
    guess.
    """
    return UnitCosts(
        **{n: aims[n].price if aims[n].sigma < 0.5 else getattr(guess, n) for n in UNIT_COST_NAMES}
    )


def _draft(prices: UnitCosts, shape: ModelTraits | None, front: float) -> CostProfile:
    return CostProfile(
        name="draft",
        engine="as recorded",
        model="",
        gpu="",
        basis="measured",
        terms=cost_terms(prices, shape),
        idle_pass_s=1e-5,
        front_s=front,
        range={},
        fit=FitQuality(points=0),
        source=[],
    )


def build_profile_of_steps(
    prices: UnitCosts,
    errors: Floats,
    prefills: npt.NDArray[np.bool_],
    shape: ModelTraits | None,
    count: int,
) -> CostProfile:
    """Return a profile of ``count`` logged steps, with placeholders for its name, model and GPU.

    ``errors`` contains log(fitted / measured duration) of the held-out steps. ``prefills`` is true
    for each held-out step with a prefill.
    """
    held_out = summarize_errors_by_kind(_named(errors[prefills], errors[~prefills]))
    return _draft(prices, shape, 0.0).model_copy(
        update={
            "fit": FitQuality(
                points=count, note=f"fitted to {count} logged steps", held_out=held_out
            ),
            "source": [f"{count} steps as logged"],
        }
    )


class _Fit(NamedTuple):
    """A simulation with given unit costs, its request times, and their error (``missed``)."""

    prices: UnitCosts
    missed: float
    run: ScenarioRun
    times: pd.DataFrame


class _Fitter:
    """Adjustment of unit costs until the simulation reproduces the measured times."""

    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[Request],
        observed: pd.DataFrame,
        measured: ObservedTimes,
        shape: ModelTraits | None,
        front: float,
        aims: dict[str, CostPrior],
        tell: Callable[[int, int], None],
        warm_up: npt.NDArray[np.bool_],
    ) -> None:
        self.scenario, self.requests = scenario, list(requests)
        self.observed = observed
        self.measured = measured
        self.shape, self.front, self.aims, self.tell = shape, front, aims, tell
        few = len(self.requests) < 2 * HOLDOUT_EVERY
        fitted = [few or i % HOLDOUT_EVERY != 3 for i in range(len(self.requests))]
        self.kept, self.used = np.array(fitted) & ~warm_up, ~warm_up
        self.done = 0

    def fitted(self, start: UnitCosts, rounds: int) -> _Fit:
        """Return the simulation with the smallest error of ``rounds`` simulations."""
        best, prices = None, start
        for last in [*[False] * (rounds - 1), True]:
            made = self._simulated(prices)
            if best is None or made.missed < best.missed:
                best = made
            if last:
                break
            moved = self._moved(
                prices, FixedSchedule.of(made.run, len(self.requests), prices, self.shape)
            )
            if np.abs(np.log(np.array(astuple(moved)) / np.array(astuple(prices)))).max() < 1e-3:
                break
            prices = moved
        assert best is not None
        return best

    def _missed(self, simulated: pd.DataFrame) -> float:
        """Return the error of the simulated times relative to the measured times."""
        prefill, decode = self.measured.beside(simulated)
        single = np.concatenate([prefill[self.kept], decode[self.kept]])
        single = np.where(np.isfinite(single), single, 3.0)[np.isfinite(self._seen)]
        means = self.measured.means(simulated, self.kept)
        return float(_soft(single / REQUEST_SCATTER).mean() + _soft(means / MEAN_SCATTER).sum())

    @property
    def _seen(self) -> Floats:
        return np.concatenate([self.measured.prefill[self.kept], self.measured.decode[self.kept]])

    def _moved(self, start: UnitCosts, frozen: FixedSchedule) -> UnitCosts:
        """Return the unit costs with the smallest error for unchanged batches."""
        begin = np.log(np.array(astuple(start)))
        centre = np.array([np.log(self.aims[name].price) for name in UNIT_COST_NAMES])
        sigma = np.array([self.aims[name].sigma for name in UNIT_COST_NAMES])
        steps = np.maximum(self.observed["output_tokens"].to_numpy(np.float64) - 1, 1)
        weight = np.sqrt(self.kept.sum()) * REQUEST_SCATTER / MEAN_SCATTER / 5

        def errors(logs: Floats) -> Floats:
            prefill, decode, until = frozen.spans(UnitCosts(*np.exp(logs).tolist()))
            shown = until + self.front if self.measured.with_queue else prefill
            apart = [_log(shown, self.measured.prefill), _log(decode / steps, self.measured.decode)]
            found = np.concatenate([one[self.kept] for one in apart])
            known = np.isfinite(found)
            means = [_mean_log(decode / steps, self.measured.decode, self.kept)]
            both = np.concatenate([np.where(known, found, 0.0), weight * np.array(means)])
            return np.concatenate([both / REQUEST_SCATTER, (logs - centre) / sigma])

        found = least_squares(
            errors, begin, bounds=(begin - 2, begin + 2), loss="soft_l1", f_scale=2.0, max_nfev=40
        )
        return UnitCosts(*np.exp(found.x).tolist())

    def _simulated(self, prices: UnitCosts) -> _Fit:
        run = simulate_with_profile(self.scenario, self._draft(prices), self.requests)
        self.done += 1
        self.tell(self.done, ROUNDS)
        times = request_times(run.record, self.front).reindex(range(len(self.requests)))
        missed = self._missed(times)
        return _Fit(prices, np.inf if np.isnan(missed) else missed, run, times)

    def _draft(self, prices: UnitCosts) -> CostProfile:
        return _draft(prices, self.shape, self.front)

    def profile(self, fit: _Fit, setup: ServerSetup) -> CostProfile:
        """Return the profile of a simulation, with the errors of the held-out requests."""
        prefill, decode = self.measured.beside(fit.times)
        left = self.used & ~self.kept if (self.used & ~self.kept).any() else self.kept
        held_out = summarize_errors_by_kind(_named(prefill[left], decode[left]))
        few = not (self.used & ~self.kept).any()
        told = "; too few to hold any out, so the errors are those of the fit" if few else ""
        served = self.observed.dropna(subset=["e2e_ms"])
        low, high = _concurrency(served)
        prompts = served["prompt_tokens"]
        return self._draft(fit.prices).model_copy(
            update={
                "name": f"{setup.engine['name']} as recorded",
                "model": setup.model or "unknown",
                "gpu": setup.gpu or "unknown",
                "range": {
                    "prefill_tokens": (float(prompts.min()), float(prompts.max())),
                    "decode_seqs": (1.0, high),
                },
                "fit": FitQuality(
                    points=int(self.kept.sum()),
                    note=f"the simulation fitted to {int(self.kept.sum())} requests at "
                    f"{low:.0f} to {high:.0f} concurrent requests{told}",
                    held_out=held_out,
                    beyond={"decode_seqs": BATCH_DOUBLING_ERROR},
                ),
                "source": [f"{len(served)} requests as observed"],
            }
        )


def _named(prefill: Floats, decode: Floats) -> Iterator[tuple[str, float]]:
    for kind, errors in (("prefill", prefill), ("decode", decode)):
        for error in errors[np.isfinite(errors)].tolist():
            yield kind, float(np.exp(error) - 1)


def _concurrency(served: pd.DataFrame) -> tuple[float, float]:
    """Return the 5th percentile and the maximum of the number of requests in the system at
    arrivals.
    """
    arrivals = served["t_s"].to_numpy(np.float64)
    begin, end = np.sort(arrivals), np.sort(arrivals + served["e2e_ms"].to_numpy(np.float64) / 1e3)
    present = np.searchsorted(begin, begin, "right") - np.searchsorted(end, begin)
    return float(max(np.percentile(present, 5), 1)), float(max(present.max(), 1))
