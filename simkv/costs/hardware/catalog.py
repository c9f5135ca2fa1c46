"""Models and GPUs as data: what decides how much KV fits, and how fast it can be read.

``models.json`` and ``gpus.json`` hold published configurations (the model hub's ``config.json``,
data sheets); a name is found whatever its case, with or without the organisation.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter

from simkv.core.errors import InputError, nearest
from simkv.costs.data import Data

Positive = Annotated[int, Field(gt=0)]
_HERE = Path(__file__).parent


class _Named(Data):
    name: str
    also: list[str] = Field(default=[])


class Model(_Named):
    """A decoder: ``heads`` query heads share ``kv_heads`` of ``head_dim``; a gated MLP.

    With ``experts`` every layer has so many MLPs of ``intermediate``, of which a token takes
    ``experts_per_token``. ``tied``: the output head is the embedding. ``itemsize`` is in bytes.
    """

    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    intermediate: Positive
    vocab: Positive
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False
    itemsize: Positive = 2
    max_model_len: Positive = 131072

    @property
    def parameters(self) -> int:
        """All weights, embedding and head included; biases are left out (below 0.1 %)."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        router = self.hidden * self.experts
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        others = self.layers * (attention + router + 2 * self.hidden) + embeddings + self.hidden
        return others + self.mlp_parameters

    @property
    def mlp_parameters(self) -> int:
        """Weights of the MLPs, of all experts if there are any."""
        return self.layers * 3 * self.hidden * self.intermediate * max(self.experts, 1)

    def weight_bytes(self, tensor_parallel: int = 1, expert_ranks: int = 1) -> int:
        """Bytes of weights on each of the GPUs that share the model, or its experts."""
        experts = self.mlp_parameters // expert_ranks if self.experts else self.mlp_parameters
        others = (self.parameters - self.mlp_parameters) // tensor_parallel
        if expert_ranks == 1 or not self.experts:
            experts //= tensor_parallel
        return (others + experts) * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    @property
    def flops_per_pair(self) -> int:
        """Operations of attention for one pair of a token and a token that it attends to."""
        return 4 * self.layers * self.heads * self.head_dim


class Gpu(_Named):
    """A card: ``memory_bytes`` as CUDA reports them, ``bandwidth`` (bytes/s), 16-bit ``flops``.

    ``collectives`` have, by name and number of cards, measured ``[bytes, seconds]``: bytes that
    go into an all-reduce, that a card gives to an all-gather, that it gets of a reduce-scatter.
    """

    memory_bytes: Positive
    bandwidth: Annotated[float, Field(gt=0)]
    flops: Annotated[float, Field(gt=0)]
    collectives: dict[str, dict[int, list[tuple[int, float]]]] = Field(default={})
    source: str


@lru_cache(maxsize=1)
def models() -> tuple[Model, ...]:
    """All models."""
    data = json.loads((_HERE / "models.json").read_text(encoding="utf-8"))
    return tuple(TypeAdapter(list[Model]).validate_python(data))


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """All GPUs."""
    data = json.loads((_HERE / "gpus.json").read_text(encoding="utf-8"))
    return tuple(TypeAdapter(list[Gpu]).validate_python(data))


D = TypeVar("D", Model, Gpu)


def find_model(name: str) -> Model:
    """A model by its name, with or without the organisation. Raises InputError if unknown."""
    wanted = _short(name)
    for model in models():
        if wanted in {_short(known) for known in (model.name, *model.also)}:
            return model
    raise _unknown("model", name, models())


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, or by a longer name that contains all words of one (``NVIDIA H100 80GB``).

    Of several the one with most words in common is taken. Raises InputError if none fits.
    """
    words = _words(name)
    best: tuple[int, Gpu] | None = None
    for gpu in gpus():
        for known in (gpu.name, *gpu.also):
            own = _words(known)
            if own <= words and (best is None or len(own) > best[0]):
                best = (len(own), gpu)
    if best is None:
        raise _unknown("GPU", name, gpus())
    return best[1]


def known_model(name: str) -> Model | None:
    """The model of that name, if there are data on it."""
    try:
        return find_model(name)
    except InputError:
        return None


def known_gpu(name: str) -> Gpu | None:
    """The GPU of that name, if there are data on it."""
    try:
        return find_gpu(name)
    except InputError:
        return None


def _short(name: str) -> str:
    return name.rsplit("/", 1)[-1].casefold()


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold())) - {"nvidia", "geforce", "edition"}


def _unknown(kind: str, name: str, known: tuple[D, ...]) -> InputError:
    names = [item.name for item in known]
    return InputError(
        f"{kind} {name!r} is not known{nearest(name, names)}; expected one of {', '.join(names)}"
    )
