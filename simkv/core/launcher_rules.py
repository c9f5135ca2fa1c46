"""What an engine's launcher looks at when it chooses settings that were not given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that launchers read.

    ``length`` is ``max_position_embeddings``; ``rope_type``, ``rope_factor`` and ``rope_original``
    (the length that the model was trained for) say how it is scaled. ``latent``: latent attention
    (MLA), ``sparse``: with an indexer that selects tokens. ``model_type`` is that of config.json.
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

    ``memory_bytes`` are those of one ``gpu`` as CUDA reports them, ``capability`` its compute
    capability (None: not a CUDA GPU, or unknown). ``kv`` is the format of the KV cache. ``model``
    is None where only the GPU is known.
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
    """The engine does not start with a default; ``field`` is the one to set."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(why)
        self.field = field


#: Settings by name, given the settings that the user gave and the machine.
ChooseDefaults = Callable[[Mapping[str, Any], LaunchTarget], dict[str, Any]]


def choose_nothing(_given: Mapping[str, Any], _machine: LaunchTarget) -> dict[str, Any]:
    """No defaults beyond those of the config."""
    return {}


@dataclass(frozen=True)
class LaunchRules:
    """How an engine's launcher fills in settings that were not given.

    ``before(given, machine)`` returns those that the engine knows before it has measured its
    memory. ``after(section, machine)`` returns those that follow from the size of the KV cache,
    which is in ``section`` by then, and raises LaunchError if the engine refuses to start. Both
    return nothing that is in ``given``.

    ``longest(section, most)`` is the longest sequence that the KV cache of ``section`` holds, of
    ``most`` tokens at most; None where no setting limits sequences.

    ``fields`` are the settings that may be ``auto``. ``fitted`` are those among them for which
    ``auto`` is a value of the engine's own: it is passed to ``after``.
    """

    before: ChooseDefaults = choose_nothing
    after: ChooseDefaults = choose_nothing
    longest: Callable[[Mapping[str, Any], int], int] | None = None
    fields: tuple[str, ...] = ()
    fitted: tuple[str, ...] = ()
