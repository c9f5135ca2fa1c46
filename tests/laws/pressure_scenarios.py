"""A scenario for every engine in which blocks run short, but all requests can be served."""

from __future__ import annotations

from simkv.scenario.scenario import Scenario


def plain_scenario(engine: str, variant: str) -> Scenario:
    """Return requests that can all be served, in a pool small enough for preemptions."""
    knobs = {
        "vllm": {"num_gpu_blocks": 24, "max_model_len": 200, "max_num_seqs": 8},
        "sglang": {"max_total_num_tokens": 380, "schedule_conservativeness": 0.05},
        "mistralrs": {"num_gpu_blocks": 14, "max_num_seqs": 6},
        "fastdeploy": {"num_blocks": 14, "block_size": 32, "max_num_seqs": 6},
        "trtllm": {"max_tokens_in_paged_kv_cache": 448, "max_batch_size": 6},
    }
    knobs["trtllm"]["capacity_scheduler_policy"] = (
        "MAX_UTILIZATION"  # the other policy never preempts a request
    )
    knobs["trtllm"]["enable_block_reuse"] = False
    shape = {"prompt_tokens": {"distribution": "uniform", "low": 20, "high": 90}}
    shape |= {"output_tokens": {"distribution": "uniform", "low": 5, "high": 40}}
    arrivals = {"num_prompts": 16, "request_rate": 1e6, **shape}
    return Scenario.model_validate(
        {
            "name": "plain",
            "workload": {"arrivals": arrivals},
            "engine": {"name": engine, "variant": variant, **knobs[engine]},
            "profile": "unit-step",
        }
    )
