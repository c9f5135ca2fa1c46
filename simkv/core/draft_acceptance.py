"""Number of draft tokens that the model accepts. Schedulers cannot see this number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

#: Number of output positions sampled at a time.
SAMPLES_PER_CHUNK = 32


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """Sampler of the number of accepted draft tokens after each output token.

    - ``rates`` as a float: probability that a draft is accepted if all drafts before it are
      accepted.
    - ``rates`` as a tuple: fraction of accepted drafts at each draft position. Drafts at later
      positions are never accepted.
    """

    # The fractions are in non-increasing order. The result depends only on ``seed`` and the output
    # position, not on the order of calls.

    rates: float | tuple[float, ...]
    seed: int

    def accepted(self, place: int, drafts: int) -> int:
        """Return the number of accepted drafts after output token ``place``, at most ``drafts``."""
        luck, count = _lucks(self.seed, place // SAMPLES_PER_CHUNK)[place % SAMPLES_PER_CHUNK], 0
        for chance in _chances(self.rates, drafts):
            if luck >= chance:
                break
            count += 1
        return count


@lru_cache(maxsize=2048)  # one entry per active request, each in one part of its output
def _lucks(seed: int, part: int) -> list[float]:
    """Return uniform random samples for ``SAMPLES_PER_CHUNK`` consecutive output positions."""
    dice = Random((seed << 32) + part)
    return [dice.random() for _ in range(SAMPLES_PER_CHUNK)]


@lru_cache
def _chances(rates: float | tuple[float, ...], drafts: int) -> tuple[float, ...]:
    """Return, for each draft, the probability that it and all drafts before it are accepted."""
    if isinstance(rates, tuple):
        return rates[:drafts]
    return tuple(rates ** (position + 1) for position in range(drafts))
