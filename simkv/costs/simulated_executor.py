# mypyc: compile
"""Executor that takes step durations from a cost profile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simkv.costs.cost_profile import CostProfile, Feature, StepCost
from simkv.costs.cost_terms import compute_feature
from simkv.costs.step_load import Floats, StepLoad, count_attention_pairs

#: Default duration of a drafter pass as a fraction of the model's decode step (an assumption).
DRAFTER_SHARE = 0.05
#: Below this number of steps, a loop is faster than numpy.
MIN_VECTOR_STEPS = 16


def advance_load(load: StepLoad, steps: int) -> StepLoad:
    """Return the load of the decode step that is ``steps`` steps after ``load``.

    The context of each sequence grows by one token per step.
    """
    context = load.decode_context + steps * load.decode_seqs
    shortest, longest = load.shortest, load.longest
    if longest:
        shortest, longest = shortest + steps, longest + steps
    return StepLoad(
        prefill_seqs=0,
        prefill_tokens=0,
        prefill_context=0,
        decode_seqs=load.decode_seqs,
        decode_context=context,
        emits=load.emits,
        shortest=shortest,
        longest=longest,
        group_tokens=load.group_tokens,
        group_most=load.group_most,
        group_ranks=load.group_ranks,
    )


class SimulatedExecutor:
    """Executor with step times from a cost profile. It records steps outside the profile's range.

    ``outside`` contains the seconds of steps outside the range, by feature. ``extremes`` contains
    the smallest and largest value outside the range, by feature. ``busy`` is the duration of all
    steps, and ``outside_s`` is the duration of steps outside the range, in seconds.

    ``loading`` contains the seconds to copy a LoRA adapter to the GPU, and to read it from disk
    (vLLM 0.33.0, ``_apply_adapters`` in ``vllm/lora/worker_manager.py``).

    ``drafting`` is the duration of a drafter pass divided by the duration of a decode step.
    ``layers`` is the number of layers of the model for multi-token prediction, or 0 for other
    drafters. The costs of drafts are not calibrated.
    """

    def __init__(
        self,
        profile: CostProfile,
        loading: tuple[float, float] = (0.0, 0.0),
        drafting: float = 0.0,
        layers: int = 0,
    ) -> None:
        self.profile = profile
        self._copy_s, self._read_s = loading
        self._drafting = drafting
        self._layers = layers
        self.busy = 0.0
        self.outside_s = 0.0
        self.outside: dict[Feature, float] = {}
        self.extremes: dict[Feature, tuple[float, float]] = {}
        self._cost = StepCost(profile)
        self.needs_decode_range = self._cost.needs_decode_range
        self._range = list(profile.range.items())

    def run(self, load: StepLoad) -> float:
        given = load
        if load.draft_tokens:
            rows = load.decode_seqs + load.draft_tokens
            load = load._replace(decode_seqs=rows, emits=load.emits + load.draft_tokens)
        seconds = self._cost(load)
        if load.draft_passes:
            seconds += self._draft(given, load, seconds)
        if load.lora_copies:
            seconds += load.lora_copies * self._copy_s + load.lora_reads * self._read_s
        self._account(load, seconds)
        return seconds

    def _draft(self, load: StepLoad, verified: StepLoad, seconds: float) -> float:
        """Return the duration of all drafter passes after a step, in seconds.

        ``verified`` is the load of the step with its draft tokens, and ``seconds`` is its duration.
        """
        step = StepLoad(0, 0, 0, load.emits, load.decode_context, 0, load.emits)
        if not self._layers:
            return load.draft_passes * self._drafting * self._cost(step)
        head, headless = self._cost.head(step), seconds - self._cost.head(verified)
        others = (load.draft_passes - 1) * (self._cost(step) - head)
        return (headless + others) / self._layers + load.draft_passes * head

    def forecast_steps(self, load: StepLoad, steps: int) -> Sequence[float] | Floats:
        if not self._cost.linear:
            ahead = self._cost.ahead(load, steps)
            if ahead is not None:
                return ahead
            return [self._cost(advance_load(load, step)) for step in range(1, steps + 1)]
        base, slope = self._cost.linear_decode_cost(load.decode_seqs)
        seqs = load.decode_seqs
        if steps < MIN_VECTOR_STEPS:
            first = load.decode_context + seqs
            return [base + slope * context for context in range(first, first + steps * seqs, seqs)]
        contexts = load.decode_context + seqs * np.arange(1, steps + 1)
        return np.asarray(base + slope * contexts, np.float64)

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:
        if self._inside(advance_load(load, 1)) and self._inside(advance_load(load, len(seconds))):
            self.busy += sum(seconds)
            return
        for step, taken in enumerate(seconds, start=1):
            self._account(advance_load(load, step), taken)

    def _inside(self, load: StepLoad) -> bool:
        return all(
            not (value := compute_feature(load, feature)) or low <= value <= high
            for feature, (low, high) in self._range
        )

    def _account(self, load: StepLoad, seconds: float) -> None:
        self.busy += seconds
        left = False
        for feature, (low, high) in self._range:
            value = compute_feature(load, feature)
            # A step without prefills is not outside the range of prefill features, and a step
            # without decodes not outside the range of decode features.
            if value and not low <= value <= high:
                left = True
                self.outside[feature] = self.outside.get(feature, 0.0) + seconds
                least, most = self.extremes.get(feature, (value, value))
                self.extremes[feature] = (min(least, value), max(most, value))
        if left:
            self.outside_s += seconds

    def alone(self, prompt_tokens: int, output_tokens: int) -> float:
        """Return the duration in seconds of a request in isolation, until its last token."""
        first = self._cost(
            StepLoad(1, prompt_tokens, 0, 0, 0, count_attention_pairs(prompt_tokens, 0), 1)
        )
        decodes = output_tokens - 1
        return first + decodes * self._cost(
            StepLoad(0, 0, 0, 1, prompt_tokens + decodes // 2, 0, 1)
        )

    def idle(self) -> float:
        return self.profile.idle_pass_s
