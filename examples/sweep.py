"""Run one scenario with many cache sizes, from Python.

Run the whole file, or cell by cell in an editor that supports ``# %%``.
"""

# %% The incident: a long prompt is admitted if its first chunk fits, and preempted again and again.
import simkv

REPORT = "vllm-37307-partial-admission"
outcome = simkv.run(REPORT)
print(outcome.figures.loc[["verdict", "preemptions", "recomputed_tokens", "e2e_ms.mean"]])

# %% One row per request: compare the second request before and after the fix.
print(outcome.requests[["variant", "id", "ttft_s", "e2e_s", "preemptions"]])

# %% Another cache size: override a field by its path, with two underscores for a dot.
print(simkv.compare(REPORT, engine__num_gpu_blocks=1100).loc[["preemptions", "e2e_ms.mean"]])

# %% Many cache sizes, with the rules before and after the fix; one row per run.
table = simkv.sweep(REPORT, {"engine.num_gpu_blocks": "700..1100:25"}, jobs=1)
print(
    table.pivot(index="engine.num_gpu_blocks", columns="variant", values="preemptions").to_string()
)

# %% The smallest size at which the old rule is as good as the new one.
before, after = (
    table[table["variant"] == name].set_index("engine.num_gpu_blocks")
    for name in ("before", "after")
)
as_good = before["preemptions"] <= after["preemptions"]
print(f"The old rule needs {as_good[~as_good].index.max() + 25} blocks.")
