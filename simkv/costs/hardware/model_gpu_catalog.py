"""Models and GPUs as data: what decides how much KV fits, and how fast it can be read.

``models.json`` and ``gpus.json`` hold published configurations (the model hub's ``config.json``,
data sheets). A name is found whatever its case and whatever stands between its words, with or
without the organisation: ``Llama-3.1-70B``, ``llama 3.1 70b`` and ``llama_3.1_70b`` are one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from simkv.core.errors import InputError, spelling_hint
from simkv.costs.frozen_model import FrozenModel
from simkv.costs.hardware.architecture import (
    Architecture,
    Gqa,
    MoeMlp,
    PublishedFormats,
)
from simkv.costs.hardware.hf_config import parse_architecture
from simkv.costs.hardware.interconnect import Interconnect
from simkv.costs.hardware.number_formats import FormatName

Positive = Annotated[int, Field(gt=0)]
_HERE = Path(__file__).parent


class _Named(FrozenModel):
    name: str
    also: list[str] = Field(default=[])


class _Entry(_Named):
    """A model as ``models.json`` has it: the fields of its ``config.json`` that decide shapes."""

    config: dict[str, Any]
    source: str


class Model(_Named):
    """A plain decoder: ``heads`` query heads share ``kv_heads`` of ``head_dim``; a gated MLP.

    With ``experts`` every layer has so many MLPs of ``intermediate``, of which a token takes
    ``experts_per_token``. ``tied``: the output head is the embedding. ``itemsize`` is in bytes.
    Those whose layers are not all alike have an ``Architecture`` only.
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

    ``flops_fp8`` and ``flops_fp4`` are those of smaller numbers, None where the card has none.
    ``nvlink`` and ``pcie`` are bytes/s each way of one card, as data sheets have them; ``system``
    is what published points and operator tables call it. ``gpus_per_node`` are as many as that
    joins: of GB200 and GB300 those of a rack. ``capability`` is CUDA's, None of cards without CUDA.
    ``collectives`` have, by name and number of cards, measured ``[bytes, seconds]``: bytes that go
    into an all-reduce, that a card gives to an all-gather, that it gets of a reduce-scatter.
    """

    memory_bytes: Positive
    capability: tuple[int, int] | None = None
    bandwidth: Annotated[float, Field(gt=0)]
    flops: Annotated[float, Field(gt=0)]
    flops_fp8: Annotated[float, Field(gt=0)] | None = None
    flops_fp4: Annotated[float, Field(gt=0)] | None = None
    nvlink: Annotated[float, Field(gt=0)] | None = None
    pcie: Annotated[float, Field(gt=0)]
    gpus_per_node: Positive
    system: str | None = None
    collectives: dict[str, dict[int, list[tuple[int, float]]]] = Field(default={})
    source: str

    def __hash__(self) -> int:
        return hash(self.name)

    def peak_flops(self, bits: int) -> float:
        """Operations per second on numbers of so many bits, or of the next size that it has."""
        rates = {16: self.flops, 8: self.flops_fp8, 4: self.flops_fp4}
        return next(rate for size in (4, 8, 16) if size >= bits and (rate := rates[size]))

    def interconnect(self, kind: str | None = None) -> Interconnect:
        """NVLink or PCIe as the data sheet has them; None is NVLink where there is one.

        Raises InputError for a kind that the card does not have.
        """
        if kind == "NVLink" and not self.nvlink:
            raise InputError(f"interconnect: {self.name} has no NVLink; expected PCIe")
        if self.nvlink and kind in (None, "NVLink"):
            return Interconnect("NVLink", self.nvlink)
        return Interconnect("PCIe", self.pcie)


@lru_cache(maxsize=1)
def _entries() -> tuple[_Entry, ...]:
    data = json.loads((_HERE / "models.json").read_text(encoding="utf-8"))
    return tuple(TypeAdapter(list[_Entry]).validate_python(data))


@lru_cache(maxsize=1)
def architectures() -> tuple[Architecture, ...]:
    """All models, as layers."""
    return tuple(
        replace(parse_architecture(entry.config, entry.name), source=entry.source)
        for entry in _entries()
    )


@lru_cache(maxsize=1)
def models() -> tuple[Model, ...]:
    """All models whose layers are all alike and attend to everything."""
    plain = (_plain(*pair) for pair in zip(_entries(), architectures(), strict=True))
    return tuple(model for model in plain if model)


def _plain(entry: _Entry, known: Architecture) -> Model | None:
    """An architecture as a plain decoder, or None if it is not one."""
    part, attention = known.layers[0], known.layers[0].attention
    if len(known.layers) > 1 or not isinstance(attention, Gqa) or attention.window:
        return None
    if attention.output_gate or not part.mlp.gated:
        return None
    if isinstance(part.mlp, MoeMlp) and part.mlp.shared_intermediate:
        return None
    moe = part.mlp if isinstance(part.mlp, MoeMlp) else None
    return Model(
        name=known.name,
        also=entry.also,
        layers=part.count,
        hidden=known.hidden,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        intermediate=part.mlp.intermediate,
        vocab=known.vocab,
        experts=moe.experts if moe else 0,
        experts_per_token=moe.per_token if moe else 0,
        tied=known.tied,
        max_model_len=known.max_model_len,
    )


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """All GPUs."""
    data = json.loads((_HERE / "gpus.json").read_text(encoding="utf-8"))
    return tuple(TypeAdapter(list[Gpu]).validate_python(data))


#: Ends of names of quantised models, and the format of their weights.
_ENDINGS: dict[str, FormatName] = {
    "fp8": "fp8",
    "fp8dynamic": "fp8",
    "fp4": "nvfp4",
    "nvfp4": "nvfp4",
    "awq": "int4",
    "awqint4": "int4",
    "gptqint4": "int4",
}


def other_names(model: str) -> list[str]:
    """What else a packaged model is called."""
    return next((entry.also for entry in _entries() if entry.name == model), [])


def find_model(name: str) -> Model:
    """A plain model by its name. Raises InputError if unknown or not plain."""
    wanted = _squeezed(name)
    for model in models():
        if wanted in _all_names(model):
            return model
    if any(wanted in _all_names(entry) for entry in _entries()):
        raise InputError(
            f"model {name!r}: its layers are not all alike or do not attend to everything, which "
            "this needs"
        )
    raise _unknown("model", name, [model.name for model in models()])


def find_architecture(name: str) -> Architecture:
    """A model by its name, with or without the organisation. Raises InputError if unknown.

    The name of a quantised one (``Llama-3.1-70B-Instruct-FP8``, ``-NVFP4``, ``-AWQ``) is that of
    the model with such weights.
    """
    wanted = _squeezed(name)
    for entry, known in zip(_entries(), architectures(), strict=True):
        if wanted in _all_names(entry):
            return known
    for ending, weights in sorted(_ENDINGS.items(), key=lambda item: -len(item[0])):
        base = wanted.removesuffix(ending)
        if base == wanted:
            continue
        for entry, known in zip(_entries(), architectures(), strict=True):
            if base in _all_names(entry):
                return replace(known, published=PublishedFormats(weights))
    raise _unknown("model", name, [entry.name for entry in _entries()])


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, or by a longer name that contains all words of one (``NVIDIA H100 80GB``).

    Of several the one with most words in common is taken. Raises InputError if none fits.
    """
    for gpu in gpus():
        if _squeezed(name) in {_squeezed(known) for known in (gpu.name, *gpu.also)}:
            return gpu
    words = _words(name)
    best: tuple[int, Gpu] | None = None
    for gpu in gpus():
        for known in (gpu.name, *gpu.also):
            own = _words(known)
            if own <= words and (best is None or len(own) > best[0]):
                best = (len(own), gpu)
    if best is None:
        raise _unknown("GPU", name, [gpu.name for gpu in gpus()])
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


def _all_names(item: _Named) -> set[str]:
    """A model's names as ``_squeezed`` has them, with and without what is often left out."""
    names = {_squeezed(known) for known in (item.name, *item.also)}
    shorter = {re.sub(r"^meta(?=llama)|(?:instruct|chat)?(?:hf)?$", "", name) for name in names}
    return names | shorter


def _squeezed(name: str) -> str:
    """A name's letters and digits, without the organisation or the maker."""
    return re.sub(r"[^a-z0-9]", "", _plain_words(name.rsplit("/", 1)[-1]))


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", _plain_words(name)))


def _plain_words(name: str) -> str:
    return re.sub(r"(?<![a-z])(nvidia|geforce|amd|instinct|edition)(?![a-z])", "", name.casefold())


def _unknown(kind: str, name: str, names: Sequence[str]) -> InputError:
    return InputError(
        f"{kind} {name!r} is not known{spelling_hint(name, names)}; expected one of "
        f"{', '.join(names)}"
    )
