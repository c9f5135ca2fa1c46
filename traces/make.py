"""Makes the traces in this folder: `python traces/make.py` writes the same bytes again."""

from __future__ import annotations

from pathlib import Path

from simkv.workload.convert import write_requests
from simkv.workload.workload import Workload, clients

HERE = Path(__file__).parent

#: Conversations on top of one system prompt, and lone requests in spikes.
WORKLOADS = {
    "chat.csv": {
        "sessions": {
            "num_sessions": 60,
            "request_rate": 0.5,
            "turns": {"distribution": "uniform", "low": 1, "high": 7},
            "prompt_tokens": {"distribution": "lognormal", "mean": 180, "max": 2000},
            "output_tokens": {"distribution": "lognormal", "mean": 220, "max": 1000},
            "think_time": {"distribution": "lognormal", "mean": 8, "sigma": 0.8},
            "prefix_group": "system",
            "prefix_tokens": 512,
            "seed": 1,
        }
    },
    "spikes.csv": {
        "arrivals": {
            "num_prompts": 500,
            "request_rate": 2,
            "burstiness": 0.15,
            "prompt_tokens": {"distribution": "lognormal", "mean": 900, "max": 8000},
            "output_tokens": {"distribution": "zipf", "low": 8, "high": 1024, "exponent": 0.8},
            "prefix_groups": 20,
            "prefix_tokens": 256,
            "prefix_zipf": 1.1,
            "seed": 2,
        }
    },
}


def main() -> None:
    """Write all of them."""
    for name, form in WORKLOADS.items():
        drawn = clients(Workload.model_validate(form), None)
        count = write_requests(HERE / name, drawn.requests, drawn.after)
        print(f"{name}: {count} requests")


if __name__ == "__main__":
    main()
