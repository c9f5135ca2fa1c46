"""The roofline, by hand, and lines through points that lie on a line."""

from __future__ import annotations

import pytest

from simkv.costs.cost_profile import StepCost
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.costs.step_load import StepLoad, count_attention_pairs
from simkv.validation.gpu_runs.baseline_models import baselines, roofline

#: The ceilings measured on one H200: a device copy and a bf16 matrix product.
H200 = (4.3e12, 790e12)


@pytest.mark.parametrize(
    ("model", "load", "milliseconds"),
    [
        # Weights that a step reads over 4.3 TB/s, and KV of 131,072 (12,288) bytes per token.
        ("llama-3-8b", StepLoad(0, 0, 0, 1, 512), 3.506),
        ("llama-3-8b", StepLoad(0, 0, 0, 64, 64 * 4096), 11.485),
        ("qwen2.5-0.5b", StepLoad(0, 0, 0, 8, 8 * 512), 0.242),
        # 2 FLOPs per weight and token, and 4 per head, dimension and pair.
        ("llama-3-8b", StepLoad(1, 2048, 0, 0, 0, count_attention_pairs(2048, 0)), 37.6),
        ("llama-3-8b", StepLoad(1, 2048, 4096, 0, 0, count_attention_pairs(2048, 4096)), 43.1),
        ("llama-3-8b", StepLoad(1, 128, 0, 0, 0, count_attention_pairs(128, 0)), 3.50),
    ],
)
def test_roofline(model, load, milliseconds):
    cost = StepCost(roofline(MODEL_SHAPES[model], 2, *H200))
    assert 1000 * cost(load) == pytest.approx(milliseconds, rel=0.01)


def test_lines_find_a_line():
    profile = roofline(MODEL_SHAPES["tiny"], 4, *H200).model_copy(update={"graph_sizes": [64]})
    steps = [(StepLoad(0, 0, 0, n, 100 * n), 2e-3 + 1e-4 * n) for n in (1, 5, 9, 30)]
    found = baselines(steps, profile)
    line = StepCost(found["tokens only"])
    assert [line(load) for load, _ in steps] == pytest.approx([s for _, s in steps])
    constant = StepCost(found["constant step"])
    assert constant(steps[0][0]) == constant(steps[3][0])
    assert 2e-3 < constant(steps[0][0]) < 5e-3
