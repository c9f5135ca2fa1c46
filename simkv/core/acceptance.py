"""What the model makes of drafts: hidden from schedulers, as the length of an answer is."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many drafts of a request the model accepts, which is drawn for each place in its output.

    A number in ``rates`` is the chance of each draft if those before it were accepted. A tuple has
    by position the share of drafts that are accepted there, which never rises; behind its end none
    are. The same ``seed`` and place give the same, whoever asks and in whatever order.
    """

    rates: float | tuple[float, ...]
    seed: int

    def accepted(self, place: int, drafts: int) -> int:
        """Of so many drafts that follow on output token ``place``, how many are accepted."""
        luck, count = Random((self.seed << 32) + place).random(), 0
        while count < drafts and luck < self._rate(count):
            count += 1
        return count

    def _rate(self, position: int) -> float:
        if isinstance(self.rates, tuple):
            return self.rates[position] if position < len(self.rates) else 0.0
        return self.rates ** (position + 1)
