"""Devices with known costs: devices with made-up ("planted") costs, and devices described by kernel
tables.

The costs of a planted device differ from the cost model that is fitted. Matrix products are
computed in tiles of tokens; on one of the two devices, the transition between reading weights and
computing is sharper; the attention of a mixed batch exceeds the sum of its parts by another
fraction; and every sampled sequence has a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, StepCost
from simkv.costs.hardware.model_gpu_catalog import (
    Gpu,
    Model,
    find_gpu,
    find_model,
    known_gpu,
    known_model,
)
from simkv.costs.sources.aiconfigurator_profile import aiconfigurator_profile
from simkv.costs.sources.llmservingsim_profile import Sharding, bundle_model, bundle_profile
from simkv.costs.sources.measurement_files import read_settings
from simkv.costs.sources.vidur_profile import vidur_profile
from simkv.costs.step_load import StepLoad
from simkv.schedulers.vllm.execution_settings import graph_sizes


@dataclass(frozen=True)
class Device:
    """Function that returns the duration of a step (s) on a device, and facts that are known in
    advance: model and GPU.
    """

    name: str
    cost: Callable[[StepLoad], float]
    model: Model
    gpu: Gpu
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Planted:
    """A device defined by its costs in seconds.

    There are costs per step (``host``), for reading all weights, and per token, per attention pair,
    per KV token that is read, and per sampled sequence. Tokens are computed in multiples of
    ``tile``.
    """

    host: float
    weights: float
    token: float
    pair: float
    context: float
    sampled: float
    tile: int
    #: Exponent that combines the times of reading and computing: 1 gives their sum, a large number
    #: their maximum.
    sharpness: float
    #: Additional attention time of the decodes in a step with prefills, as a fraction.
    mixed: float

    def __call__(self, load: StepLoad) -> float:
        tokens = load.prefill_tokens + load.decode_seqs
        computed = self.token * self.tile * -(-tokens // self.tile)
        p = self.sharpness
        products: float = (self.weights**p + computed**p) ** (1 / p)
        read = self.context * load.decode_context * (1 + (self.mixed if load.prefill_seqs else 0))
        return (
            self.host + products + self.pair * load.prefill_pairs + read + self.sampled * load.emits
        )


def planted() -> list[Device]:
    """Return two devices: a large model on a fast GPU, and a small model on a slow GPU."""
    llama, code = find_model("Llama-3.1-8B"), find_model("CodeLlama-34b-Instruct-hf")
    large = Planted(1.5e-3, 22e-3, 9e-5, 2.4e-9, 7e-8, 2e-5, 64, 6.0, 0.4)
    small = Planted(3e-3, 60e-3, 2.1e-4, 8e-9, 5e-7, 5e-5, 32, 3.0, 0.6)
    return [
        Device(
            "planted, like a 34B on an H100",
            large,
            code,
            find_gpu("H100"),
        ),
        Device("planted, like an 8B on an L4", small, llama, find_gpu("L4")),
    ]


def of_profile(name: str, profile: CostProfile, model: Model, gpu: Gpu, ranks: int = 1) -> Device:
    """Return the device that a profile describes; all decodes of a step have equal context
    lengths.
    """
    even = profile.attention and profile.attention.model_copy(update={"skew": None})
    cost = StepCost(profile.model_copy(update={"attention": even}))
    return Device(name, cost, model, gpu, ranks)


def of_tables(folder: Path) -> Iterator[Device]:
    """Yield the devices of all kernel tables in a folder whose models and GPUs are known.

    Reads bundles of LLMServingSim, tables of aiconfigurator, and Vidur's tables of one model on two
    GPUs.
    """
    yield from _of_bundles(sorted(path.parent for path in folder.glob("*/meta.yaml")))
    llama = find_model("Llama-3.1-8B")
    for path in sorted(folder.glob("*/gemm_perf.parquet")):
        try:
            profile = aiconfigurator_profile(path.parent, llama)
        except InputError:  # the table has other numbers of heads, or pyarrow is missing
            continue
        if gpu := known_gpu(profile.gpu):
            yield of_profile(f"{path.parent.name}, {llama.name}", profile, llama, gpu)
    for path in sorted(folder.glob("*/*.mlp.csv*")):
        model, gpu = known_model(path.name.partition(".mlp")[0]), known_gpu("A100")
        attention = path.with_name("attention.csv.gz")
        if model and gpu and attention.is_file() and "a100" in path.parent.name:
            profile = vidur_profile(path, attention, model, gpu.name, 2)
            yield of_profile(f"{path.parent.name}, {model.name}, two GPUs", profile, model, gpu, 2)


def _of_bundles(folders: list[Path]) -> Iterator[Device]:
    for folder in folders:
        model = known_model(bundle_model(folder))
        gpu = known_gpu(str(read_settings(folder / "meta.yaml").get("gpu", "")))
        if model is None or gpu is None:
            continue
        layout = Sharding(model.layers, 1, model.hidden, model.experts, model.experts_per_token)
        try:
            profile = bundle_profile(folder, layout, graph_sizes(256))
        except InputError:
            continue
        yield of_profile(folder.name, profile, model, gpu)
