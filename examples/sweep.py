"""Where is the cliff? One scenario at many sizes of its cache, from Python.

Read it from top to bottom, or run it cell by cell in an editor that knows ``# %%``.
"""

# %% The report: a long prompt is admitted if its first chunk fits, and preempted again and again.
import simkv

REPORT = "vllm-37307-partial-admission"
outcome = simkv.run(REPORT)
print(outcome.figures.loc[["verdict", "preemptions", "recomputed_tokens", "e2e_ms.mean"]])

# %% The same requests one by one: what did it cost the second one?
print(outcome.requests[["variant", "id", "ttft_s", "e2e_s", "preemptions"]])

# %% Another cache; a field is overridden by its path, with two underscores for a dot.
print(simkv.compare(REPORT, engine__num_gpu_blocks=1100).loc[["preemptions", "e2e_ms.mean"]])

# %% How large must the cache be? Two rules, sixteen sizes; one row per run.
table = simkv.sweep(REPORT, {"engine.num_gpu_blocks": "700..1100:25"}, jobs=1)
print(
    table.pivot(index="engine.num_gpu_blocks", columns="variant", values="preemptions").to_string()
)

# %% From what size on does the old rule do as well as the new one?
before, after = (
    table[table["variant"] == name].set_index("engine.num_gpu_blocks")
    for name in ("before", "after")
)
as_good = before["preemptions"] <= after["preemptions"]
print(f"The old rule needs {as_good[~as_good].index.max() + 25} blocks.")
