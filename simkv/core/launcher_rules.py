"""Defaults that an engine's launcher chooses for settings that were not given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a model that launchers read.

    ``length`` is ``max_position_embeddings``. ``rope_type``, ``rope_factor`` and ``rope_original``
    (the training length) describe its scaling. ``latent_width``: latent attention (MLA).
    ``sparse``: attention with an indexer that selects tokens. ``model_type`` is the value in
    config.json.
    """

    name: str
    length: int
    model_type: str = ""
    rope_type: str = ""
    rope_factor: float = 1.0
    rope_original: int | None = None
    latent_width: bool = False
    sparse: bool = False


@dataclass(frozen=True)
class LaunchTarget:
    """The GPUs and the model that an engine is started on.

    ``memory_bytes`` is the memory of one ``gpu`` as CUDA reports it, ``capability`` its compute
    capability (None: not a CUDA GPU, or unknown). ``kv`` is the number format of the KV cache.
    ``model`` is None if only the GPU is known.
    """

    gpu: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    kv: str = "bf16"
    model: ModelFacts | None = None

    @property
    def gib(self) -> float:
        """Memory of one GPU in GiB."""
        return self.memory_bytes / 2**30


class LaunchError(ValueError):
    """The engine does not start with a default value; ``field`` is the setting to specify."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(why)
        self.field = field


#: Return default settings by name, for the settings that the user gave and the machine.
ChooseDefaults = Callable[[Mapping[str, Any], LaunchTarget], dict[str, Any]]


def choose_nothing(_given: Mapping[str, Any], _machine: LaunchTarget) -> dict[str, Any]:
    """Return no further defaults."""
    return {}


@dataclass(frozen=True)
class LaunchRules:
    """Rules of an engine's launcher for settings that were not given.

    ``before(given, machine)`` returns the settings that the engine knows before it has measured its
    memory. ``after(section, machine)`` returns settings that follow from the KV-cache size, which
    ``section`` includes by then, and raises LaunchError if the engine refuses to start. Neither
    returns a setting that is in ``given``.

    ``longest(section, most)`` returns the longest sequence, up to ``most`` tokens, that the KV
    cache of ``section`` holds; None if no setting limits sequences.

    ``fields`` are the settings that may be ``auto``. ``fitted`` are the fields for which the engine
    itself accepts ``auto``; the value is passed to ``after``.
    """

    before: ChooseDefaults = choose_nothing
    after: ChooseDefaults = choose_nothing
    longest: Callable[[Mapping[str, Any], int], int] | None = None
    fields: tuple[str, ...] = ()
    fitted: tuple[str, ...] = ()
