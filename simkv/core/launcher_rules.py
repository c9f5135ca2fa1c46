"""Defaults that an engine's launcher chooses for settings that the user did not specify."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model that the launchers of engines use.

    ``length`` is ``max_position_embeddings``. ``rope_type``, ``rope_factor`` and ``rope_original``
    (the context length in training) describe the RoPE scaling. ``latent_width`` is True for a model
    with latent attention (MLA). ``sparse`` is True if an indexer selects the tokens to attend to.
    ``model_type`` is the value in config.json.
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
    """The GPUs and the model of an engine at its start.

    ``memory_bytes`` is the memory of one ``gpu`` as reported by CUDA. ``capability`` is its compute
    capability; it is None if the GPU is not a CUDA GPU or the capability is unknown. ``kv`` is the
    number format of the KV cache. ``model`` is None if only the GPU is known.
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
    """Raised if the engine would not start with the default of a setting (``field``), so that the
    user must specify the setting.
    """

    def __init__(self, field: str, why: str) -> None:
        super().__init__(why)
        self.field = field


#: Called with the settings that the user specified and the machine; returns the defaults of other
#: settings.
ChooseDefaults = Callable[[Mapping[str, Any], LaunchTarget], dict[str, Any]]


def choose_nothing(_given: Mapping[str, Any], _machine: LaunchTarget) -> dict[str, Any]:
    """Return an empty mapping, for an engine whose launcher chooses no defaults at this stage."""
    return {}


@dataclass(frozen=True)
class LaunchRules:
    """Rules of an engine's launcher for settings that the user did not specify.

    ``before(given, machine)`` returns the defaults that the engine chooses before it measures its
    memory, except for settings in ``given``. ``after(section, machine)`` returns the defaults that
    follow from the size of the KV cache; ``section`` contains the settings so far, including this
    size. It raises LaunchError if the engine refuses to start.

    ``longest(section, most)`` returns the length in tokens, up to ``most``, of the longest sequence
    that the KV cache of ``section`` can hold. ``longest`` is None if no setting limits the length
    of sequences.

    ``fields`` are the settings that the user may set to ``auto``. ``fitted`` are the settings that
    the engine itself fits to its memory if they are ``auto``; ``after`` receives these settings
    with the value ``auto``.
    """

    before: ChooseDefaults = choose_nothing
    after: ChooseDefaults = choose_nothing
    longest: Callable[[Mapping[str, Any], int], int] | None = None
    fields: tuple[str, ...] = ()
    fitted: tuple[str, ...] = ()
