"""Plan the number of replicas of a small chat service, from Python.

Run the whole file, or cell by cell in an editor that supports ``# %%``.
"""

# %% The scenario: Poisson arrivals, vLLM, step costs fitted to published figures of an L4.
import tempfile
from pathlib import Path

import simkv

SCENARIO = """\
name: chat
workload:
  arrivals:
    num_prompts: 60
    request_rate: 1.5
    prompt_tokens: {distribution: lognormal, mean: 300, max: 2000}
    output_tokens: {distribution: uniform, low: 20, high: 80}
    seed: 1
engine: {name: vllm, num_gpu_blocks: 600, max_num_seqs: 16, max_model_len: 4096}
fleet: {replicas: 2, router: least_loaded}
profile: l4-mistralrs-pr2034
timeout: 60
"""
folder = Path(tempfile.mkdtemp())
(folder / "chat.yaml").write_text(SCENARIO)
(folder / "prices.yaml").write_text("L4: 0.80\n")

# %% The smallest fleet with a P90 TTFT of at most 2 s, for each of four seeds.
plan = simkv.plan(
    folder / "chat.yaml",
    smallest="fleet.replicas=1..12",
    objectives=["ttft_ms.p90<=2000", "longest_stall_s<=10"],
    repeats=4,
    profile_error=0.1,
    prices=f"{folder}/prices.yaml#L4",
    jobs=1,
)
print(plan)

# %% All runs of the search, one per row.
tried = plan.evaluations
worst = tried[tried["side"] == ""].groupby("fleet.replicas")[["ttft_ms.p90", "longest_stall_s"]]
print(worst.max().round(2).to_string())

# %% The cliff: latency at higher rates, with faster and slower steps (the profile's error).
cliff = plan.cliff.pivot_table(index="rate", columns="side", values="ttft_ms.p90", aggfunc="max")
print(cliff.round(0).to_string())

# %% Write all results to files: plan.json, tables and plots.
print(*(path.name for path in plan.write(folder / "plan")))
