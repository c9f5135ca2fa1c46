"""Tests of the roofline computed by hand, of fitted models on steps of a known form, and of the
training steps.
"""

from __future__ import annotations

import pytest

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostTerm, StepCost
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.costs.step_load import StepLoad, count_attention_pairs
from simkv.validation.gpu_runs.baseline_models import (
    TrainingStep,
    composed,
    fit_baselines,
    read_training,
    roofline,
    with_host,
)

#: Maximum rates measured on one H200: of a device copy and of a bf16 matrix product.
H200 = (4.3e12, 790e12)
PLAIN = roofline(MODEL_SHAPES["tiny"], 4, *H200)


@pytest.mark.parametrize(
    ("model", "load", "milliseconds"),
    [
        # Time to read the weights at 4.3 TB/s, and 131,072 (12,288) bytes of KV per token.
        ("llama-3-8b", StepLoad(0, 0, 0, 1, 512), 3.506),
        ("llama-3-8b", StepLoad(0, 0, 0, 64, 64 * 4096), 11.485),
        ("qwen2.5-0.5b", StepLoad(0, 0, 0, 8, 8 * 512), 0.242),
        # 2 FLOPs per weight and token, and 4 per head, dimension and pair of tokens.
        ("llama-3-8b", StepLoad(1, 2048, 0, 0, 0, count_attention_pairs(2048, 0)), 37.6),
        ("llama-3-8b", StepLoad(1, 2048, 4096, 0, 0, count_attention_pairs(2048, 4096)), 43.1),
        ("llama-3-8b", StepLoad(1, 128, 0, 0, 0, count_attention_pairs(128, 0)), 3.50),
    ],
)
def test_roofline(model, load, milliseconds):
    cost = StepCost(roofline(MODEL_SHAPES[model], 2, *H200))
    assert 1000 * cost(load) == pytest.approx(milliseconds, rel=0.01)


def steps_of(cost):
    """Return decode steps and prefills with the given cost."""
    loads = [StepLoad(0, 0, 0, n, n * c) for n in (1, 5, 9, 30) for c in (10, 100, 700)]
    loads += [StepLoad(1, t, 0, n, 50 * n, t * t // 2) for t in (20, 90, 400) for n in (0, 7)]
    return [TrainingStep(load, cost(load)) for load in loads]


def test_linear_models_reproduce_their_own_form():
    def priced(load):
        return (
            2e-3 + 1e-5 * load.prefill_tokens + 1e-8 * load.prefill_pairs
            + 2e-5 * load.decode_seqs + 3e-8 * load.decode_context
        )  # fmt: skip

    for name, cost in (
        ("constant step", lambda load: 2e-3),
        ("tokens only", lambda load: 2e-3 + 1e-4 * (load.prefill_tokens + load.decode_seqs)),
        ("five prices", priced),
    ):
        steps = steps_of(cost)
        models = fit_baselines(steps, PLAIN)
        predicted = models[name].seconds([step.load for step in steps])
        assert predicted == pytest.approx([step.seconds for step in steps], rel=1e-5), name
    constant = models["constant step"].seconds([step.load for step in steps])
    assert len(set(constant)) == 1
    assert models["five prices"].profile is not None


def test_random_forest_learns_nonlinear_costs():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    steps = steps_of(lambda load: 1e-2 if load.decode_seqs > 6 else 1e-3)
    models = fit_baselines(steps * 5, PLAIN)
    assert models["random forest"].profile is None
    for step, found in zip(
        steps, models["random forest"].seconds([s.load for s in steps]), strict=True
    ):
        assert found == pytest.approx(step.seconds, rel=0.3)


def test_without_steps_there_are_no_baselines():
    assert fit_baselines([], PLAIN) == {}


def test_host_time_of_whole_steps_is_added_or_overlapped():
    host = CostTerm(name="host, per step", feature="steps", seconds=2e-3)
    step = TrainingStep(StepLoad(0, 0, 0, 4, 40), 1e-3)
    behind = PLAIN.model_copy(update={"terms": [*PLAIN.terms, host]})
    assert with_host([step], behind)[0].seconds == pytest.approx(3e-3, rel=1e-5)
    ahead = PLAIN.model_copy(update={"floor": [host]})
    assert with_host([step], ahead)[0].seconds == pytest.approx(2e-3, rel=1e-5)


def test_training_steps_of_a_campaign(tmp_path):
    assert read_training(tmp_path, PLAIN) == []
    loads = "prefill_seqs,prefill_tokens,prefill_context,decode_seqs,decode_context,prefill_pairs"
    (tmp_path / "passes.csv").write_text(
        f"variant,kind,seconds,longest_context,{loads}\n"
        "fitted,decode,0.5,9,0,0,0,2,18,0\nfitted,idle,0.1,0,0,0,0,0,0,0\n"
        "fitted-overlapped,decode,0.4,9,0,0,0,2,18,0\nother,decode,0.7,9,0,0,0,2,18,0\n"
    )
    (tmp_path / "samples.csv").write_text(
        f"key,part,longest,median_s,{loads}\nstep|a,step,5,0.25,0,0,0,1,5,0\n"
        "sentinel step|b,step,5,9.0,0,0,0,1,5,0\nrest|c,rest,0,8.0,0,0,0,1,0,0\n"
    )
    found = read_training(tmp_path, PLAIN)
    assert [step.seconds for step in found] == pytest.approx([0.5, 0.25], rel=1e-6)
    assert found[0].load == StepLoad(0, 0, 0, 2, 18, longest=9)
    host = CostTerm(name="host", feature="steps", seconds=1e-3)
    ahead = read_training(tmp_path, PLAIN.model_copy(update={"floor": [host]}))
    assert [step.seconds for step in ahead] == pytest.approx([0.4, 0.25], rel=1e-6)
    (tmp_path / "samples.csv").write_text("key,part\nstep|a,step\n")
    with pytest.raises(InputError, match="not a directory written by `simkv gpu calibrate`"):
        read_training(tmp_path, PLAIN)


def test_composed_costs_of_a_catalog_entry():
    found = composed("NVIDIA H100 80GB HBM3", "llama-3-8b")
    assert found is not None
    assert found.basis == "composed of measured operators"
    assert 5e-3 < StepCost(found)(StepLoad(0, 0, 0, 64, 64_000)) < 2e-2
    assert composed("NVIDIA H100 80GB HBM3", "tiny") is None
    assert composed("x86_64", "llama-3-8b") is None
