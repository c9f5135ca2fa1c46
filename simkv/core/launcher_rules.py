"""Defaults that an engine's launcher chooses for settings that the user did not specify."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model that determine the defaults of launchers.

    - ``length``: ``max_position_embeddings``.
    - ``model_type``: value in config.json.
    - ``rope_type``, ``rope_factor``: RoPE scaling. ``rope_original``: context length in training.
    - ``latent_width``: whether the model has latent attention (MLA).
    - ``sparse``: whether an indexer selects the tokens to attend to.
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
    """GPUs and model for which an engine is launched.

    - ``memory_bytes``: memory of one GPU as CUDA reports it.
    - ``capability``: compute capability; None if unknown.
    - ``kv``: number format of the KV cache.
    - ``model``: None if only the GPU is known.
    """

    # ``capability`` is also None if the GPU is not a CUDA GPU.

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
    """Raised if the engine would not start with the default of the setting ``field``."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(why)
        self.field = field


#: Called with the settings that the user specified and the machine; returns the defaults of other
#: settings.
ChooseDefaults = Callable[[Mapping[str, Any], LaunchTarget], dict[str, Any]]


def choose_nothing(_given: Mapping[str, Any], _machine: LaunchTarget) -> dict[str, Any]:
    """Return an empty mapping. For launchers that choose no defaults."""
    return {}


@dataclass(frozen=True)
class LaunchRules:
    """Rules of an engine's launcher for settings that the user does not specify.

    - ``before(given, machine)``: defaults that do not depend on the size of the KV cache.
    - ``after(section, machine)``: defaults that follow from the size of the KV cache. Raises
      LaunchError if the engine refuses to start.
    - ``longest(section, most)``: length in tokens of the longest sequence that the KV cache holds,
      at most ``most``. The field is None if no setting limits the length.
    - ``fields``: settings that the user may set to ``auto``.
    - ``fitted``: settings whose value ``auto`` the engine itself replaces, so that they fit its
      memory.
    """

    # ``before`` omits settings in ``given``. ``section`` contains the settings so far, including
    # the size of the KV cache. ``after`` receives the ``fitted`` settings with the value ``auto``.

    before: ChooseDefaults = choose_nothing
    after: ChooseDefaults = choose_nothing
    longest: Callable[[Mapping[str, Any], int], int] | None = None
    fields: tuple[str, ...] = ()
    fitted: tuple[str, ...] = ()
