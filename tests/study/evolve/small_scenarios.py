"""Small scenarios in which a policy makes a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

#: The first request needs most of the cache, and is queued before many small requests.
MIXED: dict[str, Any] = {
    "name": "mixed",
    "workload": {
        "arrivals": {
            "num_prompts": 24,
            "request_rate": 0.2,
            "prompt_tokens": {"distribution": "lognormal", "mean": 60, "sigma": 1.1, "max": 400},
            "output_tokens": {"distribution": "uniform", "low": 4, "high": 30},
            "seed": 7,
        }
    },
    "engine": {
        "name": "vllm",
        "num_gpu_blocks": 33,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
    },
    "profile": "unit-step",
}


def write(folder: Path, **changes: Any) -> Path:
    """Write the scenario to a file with some sections changed, and return its path."""
    path = folder / "mixed.yaml"
    with path.open("w") as file:
        YAML().dump({**MIXED, **changes}, file)
    return path
