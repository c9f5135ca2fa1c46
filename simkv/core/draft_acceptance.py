"""What the model makes of drafts: hidden from schedulers, as the length of an answer is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

#: Of an output so many places are drawn at a time.
SAMPLES_PER_CHUNK = 32


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """How many drafts of a request the model accepts, which is drawn for each place in its output.

    A number in ``rates`` is the chance of each draft if those before it were accepted. A tuple has
    by position the share of drafts that are accepted there, which never rises; behind its end none
    are. The same ``seed`` and place give the same, whoever asks and in whatever order.
    """

    rates: float | tuple[float, ...]
    seed: int

    def accepted(self, place: int, drafts: int) -> int:
        """Of so many drafts that follow on output token ``place``, how many are accepted."""
        luck, count = _lucks(self.seed, place // SAMPLES_PER_CHUNK)[place % SAMPLES_PER_CHUNK], 0
        for chance in _chances(self.rates, drafts):
            if luck >= chance:
                break
            count += 1
        return count


@lru_cache(maxsize=2048)  # for as many requests at a time, each in a part of its output
def _lucks(seed: int, part: int) -> list[float]:
    """What is drawn for the places of a part of the output."""
    dice = Random((seed << 32) + part)
    return [dice.random() for _ in range(SAMPLES_PER_CHUNK)]


@lru_cache
def _chances(rates: float | tuple[float, ...], drafts: int) -> tuple[float, ...]:
    """Of each of so many drafts, that it and those before it are accepted."""
    if isinstance(rates, tuple):
        return rates[:drafts]
    return tuple(rates ** (position + 1) for position in range(drafts))
