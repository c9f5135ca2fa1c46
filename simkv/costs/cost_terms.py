# mypyc: compile
"""Step costs as a sum of terms, each a function of one feature of the step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from simkv.costs.interpolation import extrapolate
from simkv.costs.step_load import StepLoad

FeatureFunction = Callable[[float], float]


class TermFunction:
    """A term of the step cost: ``form(feature)`` in seconds, for the steps that ``when``
    selects.
    """

    def __init__(self, feature: str, when: str, form: FeatureFunction) -> None:
        self.feature = feature
        self.form = form
        self.prefills = when in ("prefill", "mixed")
        self.decodes = when in ("decode", "mixed", "pure decode")
        self.pure = when == "pure decode"


def sum_terms(
    summands: Sequence[TermFunction], load: StepLoad, graph_sizes: Sequence[int]
) -> float:
    """Return the duration of a step in seconds, as the sum of all terms that apply to the step."""
    prefills, decodes = load.prefill_seqs > 0, load.decode_seqs > 0
    seconds = 0.0
    for summand in summands:
        if summand.prefills and not prefills:
            continue
        if summand.decodes and not decodes:
            continue
        if summand.pure and prefills:
            continue
        seconds += summand.form(compute_feature(load, summand.feature, graph_sizes))
    return max(seconds, 0.0)  # a line with negative slope can become negative far outside the range


def compute_feature(load: StepLoad, feature: str, graph_sizes: Sequence[int] = ()) -> float:
    """Return the value of a feature of one step.

    ``graph_sizes`` are the token counts of captured CUDA graphs. Data-parallel ranks in lockstep
    are padded as in vLLM 0.19.0 (``_synchronize_dp_ranks`` in ``vllm/v1/worker/dp_utils.py``).
    """
    if feature == "steps":
        return 1
    if feature == "tokens":
        return load.prefill_tokens + load.decode_seqs
    if feature == "slots":
        tokens = load.prefill_tokens + load.decode_seqs
        return _padded(tokens, load.group_most, graph_sizes)
    if feature == "group_tokens":
        if graph_sizes and 0 < load.group_most <= graph_sizes[-1]:
            return load.group_ranks * _padded(load.group_most, 0, graph_sizes)
        return load.group_tokens or load.prefill_tokens + load.decode_seqs
    if feature == "decode_mean":
        return load.decode_context / load.decode_seqs if load.decode_seqs else 0
    if feature == "prefill_mean":
        return load.prefill_pairs / load.prefill_tokens if load.prefill_tokens else 0
    if feature == "decode_tail":
        return max(load.longest - load.decode_context / load.decode_seqs, 0) if load.longest else 0
    if feature == "mixed_decode_seqs":
        return load.decode_seqs if load.prefill_seqs else 0
    value: int = getattr(load, feature)
    return value


def _padded(tokens: int, most: int, graph_sizes: Sequence[int]) -> int:
    """Return ``tokens`` padded to the size of a CUDA graph.

    ``most`` is the number of tokens of the largest rank in lockstep, from which the graph size is
    chosen.
    """
    if not graph_sizes or tokens > graph_sizes[-1]:
        return tokens
    wanted = max(tokens, most) if most <= graph_sizes[-1] else tokens
    return graph_sizes[bisect_left(graph_sizes, wanted)]


def make_linear(slope: float) -> FeatureFunction:
    """Return the function ``slope * x``."""
    return lambda x: slope * x


def make_piecewise_linear(pieces: Sequence[tuple[float, float, float]]) -> FeatureFunction:
    """Return a piecewise linear function.

    Each piece is a tuple of the largest x, the base and the slope. The largest x of the last piece
    must be infinite.
    """

    def form(x: float) -> float:
        _, base, slope = next(piece for piece in pieces if x <= piece[0])
        return base + slope * x

    return form


def make_interpolated(xs: Sequence[float], ys: Sequence[float]) -> FeatureFunction:
    """Return a function that interpolates and extrapolates linearly. Negative results become 0."""
    return lambda x: max(extrapolate(xs, ys, x), 0.0)


def memoize(form: FeatureFunction) -> FeatureFunction:
    """Return ``form`` with a cache of its results."""
    said: dict[float, float] = {}

    def keeping(x: float) -> float:
        seconds = said.get(x)
        if seconds is None:
            seconds = said[x] = form(x)
        return seconds

    return keeping
