"""Print the validation plans of GPUs, with costs from their data sheets instead of a profile.

python -m tests.validation.gpu_runs.plan_table
"""

from __future__ import annotations

from typing import Any

from simkv.costs.cost_profile import CostProfile
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.validation.figure_comparison import markdown
from simkv.validation.gpu_runs.baseline_models import roofline
from simkv.validation.gpu_runs.load_sizing import Trial, scale_of
from simkv.validation.gpu_runs.nominal_costs import nominal_profile
from simkv.validation.gpu_runs.validation_suite import (
    OVERLAPPED,
    SYNCHRONOUS,
    plan_trials,
    predicted_duration,
)

#: Range of a calibration campaign with its default limits.
RANGE: Any = {
    "prefill_tokens": (2, 8192),
    "prefill_context": (128, 8192),
    "decode_seqs": (1, 256),
    "decode_context": (64, 393_216),
    "decode_tail": (1, 7473),
}
#: Default duration of `simkv gpu validate`, in seconds.
BUDGET_S = 540.0
GPUS = (
    ("NVIDIA H200", "llama-3-8b"),
    ("NVIDIA H100 80GB HBM3", "llama-3-8b"),
    ("NVIDIA GeForce RTX 4090", "qwen2.5-0.5b"),
)


def profiles_for(gpu: str, model: str) -> dict[str, CostProfile]:
    """Return both profiles of a GPU, with costs from its data sheet."""
    plain = roofline(MODEL_SHAPES[model], 2, 1e12, 1e14).model_copy(update={"gpu": gpu})
    base = nominal_profile(plain).model_copy(update={"gpu": gpu, "range": RANGE})
    overlapped = base.model_copy(
        update={"name": "overlapped", "terms": base.terms[:-1], "floor": base.terms[-1:]}
    )
    return {OVERLAPPED: overlapped, SYNCHRONOUS: base}


def planned(gpu: str, model: str) -> list[Trial]:
    """Return the validation plan of a GPU."""
    profiles = profiles_for(gpu, model)
    main = profiles[OVERLAPPED]
    return plan_trials(profiles, scale_of(main), BUDGET_S, sized_by=nominal_profile(main))


def main() -> None:
    titles = ["trial", "rows (mean)", "rows (peak)", "KV tokens (peak)", "preemptions", "seconds"]
    for gpu, model in GPUS:
        trials = planned(gpu, model)
        outside = sorted({name for t in trials for name in t.predicted["outside"]})
        minutes, pool = predicted_duration(trials) / 60, RANGE["decode_context"][1]
        print(f"\n{gpu}, {model}: {minutes:.1f} minutes, pool of {pool:,} tokens, outside the "
              f"calibrated range: {', '.join(outside) or 'nothing'}\n")  # fmt: skip
        rows = [
            [
                trial.name,
                f"{trial.predicted['rows_mean']:.0f}",
                str(trial.predicted["rows_peak"]),
                f"{trial.predicted['kv_tokens_peak']:,}",
                str(trial.predicted["preemptions"]),
                f"{trial.predicted_s:.1f}",
            ]
            for trial in trials
        ]
        print("\n".join(markdown(titles, rows, 1)))


if __name__ == "__main__":
    main()
