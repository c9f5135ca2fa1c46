"""Tests of the real runs of a campaign: their step sizes, and errors at sizes that were not
fitted.
"""

from __future__ import annotations

import pytest
import simpy

from simkv.costs.cost_profile import StepCost
from simkv.costs.step_load import StepLoad
from simkv.gpu.calibration_runs import CalibrationLoad, evaluation_loads, fit_load
from simkv.gpu.campaign import measure
from simkv.gpu.campaign_plan import (
    SMALL_LIMITS,
    Limits,
    Probe,
    plan_campaign,
)
from simkv.gpu.profile_fit import HostCosts, RealStep, fit_profile, fit_synchronous
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.workload.workload_section import build_clients
from tests.gpu.test_gpu_calibration import FakeBenchmark

LARGE = Limits()


class PlantedDevice:
    """An executor with the costs given by ``truth``, without host time."""

    needs_decode_range = False

    def __init__(self, truth):
        self.truth = truth
        self.steps: list[RealStep] = []

    def run(self, load):
        seconds = self.truth(load)
        self.steps.append(RealStep(load, seconds, seconds))
        return seconds

    def forecast_steps(self, load, steps):
        return []

    def ran(self, load, seconds):
        raise AssertionError("no steps were forecast")

    def idle(self):
        return 1e-4


def serve_on(truth, work: CalibrationLoad, limits: Limits) -> list[RealStep]:
    scenario = work.scenario(limits)
    device = PlantedDevice(truth)
    scheduler, _ = find_engine_spec(scenario.engine).build_with_tables(scenario.engine)
    engine = Engine(simpy.Environment(), scheduler, device, leaping=False)
    record = run_clients(engine, build_clients(scenario.workload, None), None)
    assert all(life.outcome == "finished" for life in record.requests.values())
    return device.steps


@pytest.mark.parametrize("limits", [SMALL_LIMITS, LARGE], ids=["small", "large"])
def test_evaluation_runs_have_other_sizes_than_the_fitted_run(limits):
    works = [fit_load(limits), *evaluation_loads(limits)]
    assert len({work.budget for work in works}) == len(works)
    fitted, *judged = ([s.load for s in serve_on(lambda _: 0.01, w, limits)] for w in works)
    loads = [load for run in judged for load in run]
    for seen in (fitted, loads):
        decodes = {load.decode_seqs for load in seen if not load.prefill_seqs}
        assert min(decodes) <= 2
        assert max(decodes) >= limits.decodes * 0.9
    chunks = [load.prefill_tokens for load in loads if load.prefill_seqs]
    assert min(chunks) <= limits.tokens // 64
    assert max(chunks) >= limits.tokens / 2
    mixed = {load.prefill_tokens + load.decode_seqs for load in loads if load.prefill_seqs}
    budget = works[0].budget
    assert min(mixed) < budget / 4
    assert max(mixed) > 2 * budget
    means = [load.decode_context / load.decode_seqs for load in loads if load.decode_seqs]
    assert min(means) < limits.context / 20
    assert max(means) > limits.context / 5


def test_errors_at_sizes_that_were_not_fitted_are_reported(tmp_path):
    """Large steps cost a quarter more in service, which the fit cannot describe.

    On other steps of the fitted run, the error would be almost zero.
    """

    def parts(point: Probe) -> float:
        load, slots = point.load, FakeBenchmark().size(point).tokens
        rest = 5e-3 + slots * 1e-5
        decode = 1e-4 + 3e-8 * load.decode_context
        prefill = 1e-4 + 5e-9 * load.prefill_pairs
        whole = rest + decode * bool(load.decode_seqs) + prefill * bool(load.prefill_seqs)
        return {"rest": rest, "decode": decode, "prefill": prefill}.get(point.part, whole)

    samples = measure(
        FakeBenchmark(parts), plan_campaign(SMALL_LIMITS), tmp_path / "s.csv", 1e9, repeats=1
    )
    nothing = HostCosts(0.0, 0.0, 1e-4)
    about = {"name": "x", "model": "m", "gpu": "g", "source": []}
    cost = StepCost(fit_profile(samples, nothing, **about))
    work, others = fit_load(SMALL_LIMITS), evaluation_loads(SMALL_LIMITS)

    def even(load: StepLoad) -> float:
        return cost(load) + 1e-3 * bool(load.prefill_seqs)

    def uneven(load: StepLoad) -> float:
        large = load.prefill_tokens + load.decode_seqs > work.budget
        return (1.25 if large else 1.0) * even(load)

    told = {}
    for name, truth in (("even", even), ("uneven", uneven)):
        real = serve_on(truth, work, SMALL_LIMITS)
        judged = [step for other in others for step in serve_on(truth, other, SMALL_LIMITS)]
        isolated = fit_profile(samples, nothing, **about)
        told[name] = fit_synchronous(isolated, real, judged).fit.held_out["prefill"]
        own = fit_synchronous(isolated, real, real[1::2]).fit.held_out["all"]
        assert own.p95 < 1e-6
    assert told["even"].p95 < 1e-6
    assert told["uneven"].p95 > 0.15
