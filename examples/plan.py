"""How many replicas, and where is the cliff? A plan for a small chat service, from Python.

Read it from top to bottom, or run it cell by cell in an editor that knows ``# %%``.
"""

# %% The scenario: Poisson arrivals, vLLM, costs that were fitted to published figures of an L4.
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

# %% The smallest fleet with which nine of ten first tokens come within 2 s, for each of four seeds.
plan = simkv.plan(
    folder / "chat.yaml",
    smallest="fleet.replicas=1..12",
    objectives=["ttft_ms.p90<=2000", "longest_stall_s<=10"],
    repeats=4,
    profile_error=0.1,
    prices=folder / "prices.yaml",
    gpu="L4",
    jobs=1,
)
print(plan)

# %% Every run that the search made is a row of a table.
tried = plan.evaluations
worst = tried[tried["side"] == ""].groupby("fleet.replicas")[["ttft_ms.p90", "longest_stall_s"]]
print(worst.max().round(2).to_string())

# %% The cliff: the same requests, faster; between a cheaper and a dearer GPU than the profile says.
cliff = plan.cliff.pivot_table(index="rate", columns="side", values="ttft_ms.p90", aggfunc="max")
print(cliff.round(0).to_string())

# %% All of it as files: plan.json, tables and pictures.
print(*(path.name for path in plan.write(folder / "plan")))
