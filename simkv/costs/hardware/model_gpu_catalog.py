"""Catalog of models and GPUs, with the data that determine KV capacity and memory bandwidth.

``models.json`` and ``gpus.json`` contain published configurations (``config.json`` files of models,
data sheets of GPUs). Names are compared without case, separators and organization:
``meta-llama/Llama-3.1-70B``, ``llama 3.1 70b`` and ``llama_3.1_70b`` are equal.
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

from simkv.core.errors import InputError, nearest_names
from simkv.costs.frozen_model import FrozenModel
from simkv.costs.hardware.hf_config import parse_architecture
from simkv.costs.hardware.interconnect import Interconnect
from simkv.costs.hardware.model_architecture import (
    Architecture,
    Gqa,
    MoeMlp,
    PublishedFormats,
)
from simkv.costs.hardware.number_formats import FormatName

Positive = Annotated[int, Field(gt=0)]
_HERE = Path(__file__).parent


class _Named(FrozenModel):
    name: str
    also: list[str] = Field(default=[])


class _Entry(_Named):
    """An entry of ``models.json``. ``config`` has the fields of a ``config.json`` that determine
    shapes. ``lengths`` are the maximum sequence lengths of names in ``also`` that differ from
    ``config``.
    """

    config: dict[str, Any]
    lengths: dict[str, int] = Field(default={})
    source: str


class Model(_Named):
    """A decoder with equal layers: full grouped-query attention, and a gated MLP or experts.

    ``heads`` query heads share ``kv_heads`` KV heads of size ``head_dim``. ``intermediate`` is the
    width of the MLP or of each expert. ``tied`` is true if the output head and the embedding share
    their weights. ``itemsize`` is the number of bytes per weight and KV number.
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
        """Number of parameters with embedding and output head. Biases (below 0.1 %) are not
        counted.
        """
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        router = self.hidden * self.experts
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        others = self.layers * (attention + router + 2 * self.hidden) + embeddings + self.hidden
        return others + self.mlp_parameters

    @property
    def mlp_parameters(self) -> int:
        """Number of parameters of all MLPs, including all experts."""
        return self.layers * 3 * self.hidden * self.intermediate * max(self.experts, 1)

    def weight_bytes(self, tensor_parallel: int = 1, expert_ranks: int = 1) -> int:
        """Return the bytes of weights per GPU, for the given numbers of GPUs."""
        experts = self.mlp_parameters // expert_ranks if self.experts else self.mlp_parameters
        others = (self.parameters - self.mlp_parameters) // tensor_parallel
        if expert_ranks == 1 or not self.experts:
            experts //= tensor_parallel
        return (others + experts) * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    @property
    def flops_per_pair(self) -> int:
        """FLOP of attention for one pair of tokens (token, attended token), over all layers."""
        return 4 * self.layers * self.heads * self.head_dim


class Gpu(_Named):
    """A GPU: ``memory_bytes`` as reported by CUDA, ``bandwidth`` in bytes/s, and 16-bit ``flops``.

    ``flops_fp8`` and ``flops_fp4`` are None if the GPU does not support the format. ``nvlink`` and
    ``pcie`` are in bytes/s per GPU and direction, from data sheets. ``system`` is the name of the
    GPU in operator tables. ``gpus_per_node`` is the number of GPUs that the interconnect joins.
    ``capability`` is the CUDA compute capability, or None without CUDA. ``collectives`` contains
    measured pairs of bytes and seconds, by collective and number of GPUs.
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
        """Return the FLOP/s for numbers of ``bits`` bits, or of the next larger supported size."""
        rates = {16: self.flops, 8: self.flops_fp8, 4: self.flops_fp4}
        return next(rate for size in (4, 8, 16) if size >= bits and (rate := rates[size]))

    def interconnect(self, kind: str | None = None) -> Interconnect:
        """Return the interconnect of the given ``kind`` (NVLink or PCIe), as in the data sheet.

        None selects NVLink if the GPU has it. Raises InputError if the GPU does not have the kind.
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
    """Return the architectures of all models in the catalog."""
    return tuple(
        replace(parse_architecture(entry.config, entry.name), source=entry.source)
        for entry in _entries()
    )


@lru_cache(maxsize=1)
def models() -> tuple[Model, ...]:
    """Return all models of the catalog whose layers are equal and use full attention."""
    plain = (_plain(*pair) for pair in zip(_entries(), architectures(), strict=True))
    return tuple(model for model in plain if model)


def _plain(entry: _Entry, known: Architecture) -> Model | None:
    """Return a model of the catalog as a ``Model``, or None if ``Model`` cannot describe it."""
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
    """Return all GPUs of the catalog."""
    data = json.loads((_HERE / "gpus.json").read_text(encoding="utf-8"))
    return tuple(TypeAdapter(list[Gpu]).validate_python(data))


#: Suffixes of quantized model names, and their weight formats.
_ENDINGS: dict[str, FormatName] = {
    "fp8": "fp8",
    "fp8dynamic": "fp8",
    "fp4": "nvfp4",
    "nvfp4": "nvfp4",
    "awq": "int4",
    "awqint4": "int4",
    "gptqint4": "int4",
}
#: Beginnings of the names of models whose published ``-FP8`` checkpoints have one scale per 128x128
#: block (``quantization_config`` of Qwen/Qwen3-32B-FP8 and of the other FP8 checkpoints of Qwen3).
BLOCK_SCALED = ("Qwen/Qwen3",)


def other_names(model: str) -> list[str]:
    """Return the alternative names of a model in the catalog."""
    return next((entry.also for entry in _entries() if entry.name == model), [])


def find_model(name: str) -> Model:
    """Return the ``Model`` with the given name.

    Raises InputError if the model is unknown, or if its layers are not equal or lack full
    attention.
    """
    wanted = _squeezed(name)
    for model in models():
        if wanted in _all_names(model):
            return model
    if any(wanted in _all_names(entry) for entry in _entries()):
        raise InputError(
            f"model {name!r}: not supported; this table requires a model whose layers are all "
            "equal and use full attention"
        )
    raise _unknown("model", name, [model.name for model in models()])


def find_architecture(name: str) -> Architecture:
    """Return the architecture of a model. Raises InputError if the model is unknown.

    The name of a quantized model, such as ``Llama-3.1-70B-Instruct-FP8``, selects the base model
    with quantized weights.
    """
    wanted = re.sub(r"^meta(?=llama)", "", _squeezed(name))
    for entry, known in zip(_entries(), architectures(), strict=True):
        if wanted in _all_names(entry):
            return _with_length(known, entry, wanted)
    for ending, weights in sorted(_ENDINGS.items(), key=lambda item: -len(item[0])):
        base = wanted.removesuffix(ending)
        if base == wanted:
            continue
        for entry, known in zip(_entries(), architectures(), strict=True):
            if base in _all_names(entry):
                blocks = ending == "fp8" and entry.name.startswith(BLOCK_SCALED)
                return replace(
                    _with_length(known, entry, base),
                    published=PublishedFormats("fp8_block" if blocks else weights),
                )
    raise _unknown("model", name, [entry.name for entry in _entries()])


def _with_length(known: Architecture, entry: _Entry, wanted: str) -> Architecture:
    """Return the architecture with the maximum sequence length of the model called ``wanted``."""
    for name, length in entry.lengths.items():
        if _squeezed(name) == wanted:
            return replace(known, max_model_len=length)
    return known


#: Additional words in names of GPUs: number of GPUs, memory, form factor and product line.
_ADDITIONAL_WORDS = re.compile(
    r"x|\d+(?:gb|gib|g)?|gb|gib|pg\d+|hbm\d?e?|gddr\d\w?"
    r"|sxm\d?|pcie|oam|hgx|dgx|nvl\d*|server|workstation"
    r"|tesla|quadro|rtx|gpu|tensor|core|generation|ada|ampere|hopper|blackwell"
)


def find_gpu(name: str) -> Gpu:
    """Return the GPU with the given name. Raises InputError if no GPU matches.

    The name may also contain the number of GPUs, the memory, the form factor and the product line,
    as in ``2 x NVIDIA H100 80GB``, and a remark in parentheses. Other words are an error.
    """
    if "," in name:
        raise InputError(f"expected one GPU, found {name!r}; `simkv plan` accepts several")
    for gpu in gpus():
        if _squeezed(name) in {_squeezed(known) for known in (gpu.name, *gpu.also)}:
            return gpu
    words = _words(re.sub(r"\(.*\)", "", name))
    best: tuple[int, Gpu] | None = None
    for gpu in gpus():
        for known in (gpu.name, *gpu.also):
            own = _words(known)
            matches = own <= words and all(map(_ADDITIONAL_WORDS.fullmatch, words - own))
            if matches and (best is None or len(own) > best[0]):
                best = (len(own), gpu)
    if best is None:
        raise _unknown("GPU", name, [gpu.name for gpu in gpus()])
    return best[1]


def known_model(name: str) -> Model | None:
    """Return the ``Model`` with the given name, or None if ``find_model`` does not find it."""
    try:
        return find_model(name)
    except InputError:
        return None


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU with the given name, or None if ``find_gpu`` does not find it."""
    try:
        return find_gpu(name)
    except InputError:
        return None


def _all_names(item: _Named) -> set[str]:
    """Return the normalized names of a model, with and without ``meta``, ``instruct``, ``chat`` and
    ``hf``.
    """
    names = {_squeezed(known) for known in (item.name, *item.also)}
    shorter = {re.sub(r"^meta(?=llama)|(?:instruct|chat)?(?:hf)?$", "", name) for name in names}
    return names | shorter


def _squeezed(name: str) -> str:
    """Return the lower-case letters and digits of a name, without organization and manufacturer."""
    return re.sub(r"[^a-z0-9]", "", _plain_words(name.rsplit("/", 1)[-1]))


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", _plain_words(name)))


def _plain_words(name: str) -> str:
    return re.sub(r"(?<![a-z])(nvidia|geforce|amd|instinct|edition)(?![a-z])", "", name.casefold())


def _unknown(kind: str, name: str, names: Sequence[str]) -> InputError:
    return InputError(
        f"unknown {kind} {name!r}; {nearest_names(name, names)} (`simkv profile list` lists all)"
    )
