"""Host time per step, estimated from a recorded run as step time minus kernel time.

The recorded run is replayed at its own pace (``replay_paced``), which shows the steps between two
recorded outputs of tokens. Their total time is recorded, and the profile gives the time of their
kernels. Least squares divides the difference among the kinds of steps:

recorded - kernels = sum over kinds of (number of steps of the kind) x (host time of the kind)

An interval between two outputs is excluded if its error exceeds ``MAX_INTERVAL_ERROR`` times its
shortest step. The replay then made other decisions than the recorded engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from simkv.costs.cost_profile import CostProfile
from simkv.costs.sources.launch_overhead import without_host
from simkv.costs.step_load import StepLoad
from simkv.schedulers.vllm.execution_settings import graph_sizes
from simkv.validation.recorded_runs.paced_replay import PacedStep, replay_paced
from simkv.validation.recorded_runs.recorded_run import RecordedRun
from simkv.validation.recorded_runs.run_simulation import engine_of

Floats = npt.NDArray[np.float64]

#: Maximum error of an interval as a fraction of its shortest step.
MAX_INTERVAL_ERROR = 0.5
#: Maximum number of steps of an interval; longer intervals contain little information about a
#: single step.
MAX_INTERVAL_STEPS = 400
#: Residuals above this (s) get less weight, because the replay lacks a step.
ROBUST_S = 1e-3
#: Minimum number of steps of a kind, and minimum difference (s), for a mention in the text.
MIN_REPORTED_STEPS, MIN_REPORTED_S = 10, 1e-4
#: Upper bounds of the classes of decode steps, by number of sequences.
DECODE_LIMITS = (8, 32, 128)


@dataclass(frozen=True)
class StepKindTimes:
    """Mean times in seconds of the steps of one kind.

    ``kernels`` is the mean kernel time, ``host`` is the mean host time, and ``uncertainty`` is the
    standard error of ``host``. ``steps`` is the number of counted steps.
    """

    kind: str
    steps: int
    kernels: float
    host: float
    uncertainty: float

    @property
    def share(self) -> float:
        """Host time of a step as a fraction of its kernel time."""
        return self.host / self.kernels


@dataclass(frozen=True)
class HostTimes:
    """Host times of a recorded run by kind of step.

    ``intervals`` is the number of intervals between recorded token outputs. ``counted`` is the
    number of intervals in which the replayed steps agree with the record.
    """

    case: str
    kinds: list[StepKindTimes]
    intervals: int
    counted: int

    def kind(self, name: str) -> StepKindTimes:
        """Return the times of the kind ``name``. Raises StopIteration if no step has this kind."""
        return next(kind for kind in self.kinds if kind.kind == name)


@dataclass(frozen=True)
class TokenInterval:
    """The steps between two recorded token outputs, and the recorded time between them in
    seconds.
    """

    recorded: float
    steps: list[PacedStep]

    @property
    def kernels(self) -> float:
        return sum(step.kernels for step in self.steps)

    @property
    def shortest(self) -> float:
        return min(step.kernels for step in self.steps)


def host_times(case: RecordedRun, profile: CostProfile) -> HostTimes:
    """Return the host times of a recorded run. Raises InputError if data is missing."""
    config, _ = engine_of(case)
    steps = replay_paced(case, without_host(profile), config)
    largest = max(profile.graph_sizes or graph_sizes(config.max_num_seqs))
    every = list(intervals(steps))
    kinds, counted = fit_host_times(every, largest)
    return HostTimes(case.name, kinds, len(every), counted)


def intervals(steps: Sequence[PacedStep]) -> Iterator[TokenInterval]:
    """Yield the intervals between consecutive token outputs with known times.

    Idle intervals and intervals with more than ``MAX_INTERVAL_STEPS`` steps are excluded.
    """
    since: float | None = None
    passed: list[PacedStep] = []
    for step in steps:
        if step.after_idle:
            since, passed = None, []
        passed.append(step)
        if step.came is None:
            continue
        if step.sure and since is not None and len(passed) <= MAX_INTERVAL_STEPS:
            yield TokenInterval(step.came - since, passed)
        since, passed = (step.came if step.sure else None), []


def fit_host_times(every: Sequence[TokenInterval], largest: int) -> tuple[list[StepKindTimes], int]:
    """Return the host times by kind of step, and the number of intervals that agree with the
    record.

    ``largest`` is the size of the largest CUDA graph in tokens.
    """
    names = sorted({kind_of(step.load, largest) for step in chain(*(i.steps for i in every))})
    if not names:
        return [], 0
    counts = np.array(
        [[sum(kind_of(s.load, largest) == n for s in i.steps) for n in names] for i in every], float
    )
    over = np.array([i.recorded - i.kernels for i in every])
    allowed = MAX_INTERVAL_ERROR * np.array([i.shortest for i in every])
    found = np.zeros(len(names))
    for _ in range(2):  # the second pass subtracts the first estimate before it selects intervals
        kept = np.abs(over - counts @ found) < allowed
        found, uncertainty = _fitted(counts[kept], over[kept])
    kinds = []
    for place, name in enumerate(names):
        some = [s for i, k in zip(every, kept, strict=True) if k for s in i.steps]
        own = [s.kernels for s in some if kind_of(s.load, largest) == name]
        if own:
            mean = float(np.mean(own))
            kinds.append(
                StepKindTimes(name, len(own), mean, float(found[place]), float(uncertainty[place]))
            )
    return kinds, int(kept.sum())


def _fitted(counts: Floats, over: Floats) -> tuple[Floats, Floats]:
    """Return the seconds per step of each kind by robust least squares, and their standard
    errors.
    """
    weights = 1 / np.sqrt(np.maximum(counts.sum(1), 1))

    def missed(seconds: Floats) -> Floats:
        return np.asarray((over - counts @ seconds) * weights)

    start = np.zeros(counts.shape[1])
    if not len(over):
        return start, start
    found = least_squares(missed, start, loss="soft_l1", f_scale=ROBUST_S).x
    scatter = 1.4826 * float(np.median(np.abs(missed(found))))
    weighted = counts * weights[:, None]
    spread = np.linalg.pinv(weighted.T @ weighted)
    return found, scatter * np.sqrt(np.maximum(np.diag(spread), 0.0))


def kind_of(load: StepLoad, largest: int) -> str:
    """Return the kind of a step as text.

    Decode steps are grouped by their number of decodes. Steps with prefills are grouped by whether
    they fit into the largest CUDA graph of ``largest`` tokens.
    """
    if load.prefill_seqs:
        what = "mixed" if load.decode_seqs else "prefill"
        tokens = load.prefill_tokens + load.decode_seqs
        return (
            f"{what}, {'in a CUDA graph' if tokens <= largest else 'over the largest CUDA graph'}"
        )
    low = 1
    for high in DECODE_LIMITS:
        if load.decode_seqs <= high:
            return f"{low} to {high} decodes"
        low = high + 1
    return f"over {DECODE_LIMITS[-1]} decodes"


def step_rows(found: Sequence[HostTimes]) -> pd.DataFrame:
    """Return one row per recorded run and kind of step, with times in ms."""
    return pd.DataFrame(
        [
            {
                "case": one.case,
                "kind": kind.kind,
                "steps": kind.steps,
                "kernels_ms": 1e3 * kind.kernels,
                "host_ms": 1e3 * kind.host,
                "uncertainty_ms": 1e3 * kind.uncertainty,
                "share_pct": 100 * kind.share,
                "intervals": one.intervals,
                "counted": one.counted,
            }
            for one in found
            for kind in one.kinds
        ]
    )


HOST_TIME_COLUMNS = ("case", "kind of step", "steps", "kernels (ms)", "above them (ms)", "share")


def step_cells(found: Sequence[HostTimes]) -> Iterator[list[str]]:
    """Yield formatted table rows with the host times of each run and kind of step."""
    for one in found:
        for kind in one.kinds:
            yield [
                one.case,
                kind.kind,
                f"{kind.steps:,}",
                f"{1e3 * kind.kernels:.1f}",
                f"{1e3 * kind.host:+.2f} ± {1e3 * kind.uncertainty:.2f}",
                f"{100 * kind.share:+.1f} %",
            ]


def describe_host_times(one: HostTimes) -> str:
    """Return a text about the kinds of steps with significant host time."""
    enough = [kind for kind in one.kinds if kind.steps >= MIN_REPORTED_STEPS]
    sure = [kind for kind in enough if abs(kind.host) > max(3 * kind.uncertainty, MIN_REPORTED_S)]
    told = [
        f"a step of kind '{kind.kind}' took {1e3 * abs(kind.host):.1f} ms "
        f"{'longer' if kind.host > 0 else 'less'} than its kernels ({100 * kind.share:+.1f} %)"
        for kind in sure
    ]
    said = "; ".join(told) or "no kind of step differs significantly from its kernels"
    return f"{one.case}: {said}; based on {one.counted} of {one.intervals} inter-token intervals"
