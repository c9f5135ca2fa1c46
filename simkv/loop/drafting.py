"""What becomes of drafts while a batch is on the GPU: the model's word, which no scheduler sees."""

from __future__ import annotations

from simkv.core.request import Request
from simkv.core.scheduler import Drafted


def emitted(request: Request, left: int, drafted: Drafted) -> int:
    """Tokens that a request gets in a batch of which ``left`` are still to come: one, and those of
    its drafts that are accepted. Notes how many these are."""
    i, accepted = request.id, 0
    drafts = 0 if i in drafted.padding else drafted.tokens.get(i, 0)
    if drafts and left > 1 and request.acceptance is not None:
        place = request.output_tokens - left
        accepted = min(request.acceptance.accepted(place, drafts), left - 1)
    drafted.accepted[i] = accepted
    return 1 + accepted


def each_token(delivered: list[int], drafted: Drafted) -> list[int]:
    """Whose clients are given a token, as often as they are."""
    return [i for i in delivered for _ in range(1 + drafted.accepted.get(i, 0))]
