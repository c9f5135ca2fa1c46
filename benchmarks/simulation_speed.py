"""Measure the speed of simkv with and without leaping, and compare it with floors measured in the
same run.

python benchmarks/simulation_speed.py [w1 w1-100k w2 w3-azure w3-mooncake w4 fleet hardware]

Times are CPU seconds of this process. They cannot be compared between machines, but their ratios to
the floors can. The simulation loop is measured without workload generation and metrics, whose times
are shown separately. W3 needs the public traces (see traces/README.md) under ../shared/workloads.
"""

from __future__ import annotations

import heapq
import resource
import sys
import time
from collections.abc import Callable, Iterator

import simpy
from speed_workloads import CASES, HERE, Case, make_fleet, poisson, vllm

from simkv.core.request import Request
from simkv.costs.cost_profile import CostProfile, load_profile
from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.replica_hardware import make_hardware
from simkv.costs.operators.profile_resolution import resolve_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.metrics.run_metrics import summarize
from simkv.schedulers.engine_registry import build_scheduler
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.workload.workload_section import Workload, generate_requests


def floors() -> Iterator[tuple[str, float]]:
    """Yield the floors for any simulator based on SimPy, in operations per CPU second."""

    def timeouts(count: int) -> None:
        env = simpy.Environment()

        def process() -> Iterator[simpy.Event]:
            for _ in range(count):
                yield env.timeout(1)

        env.process(process())
        env.run()

    def heap(count: int) -> None:
        entries = [(float(i), i) for i in range(1000)]
        for i in range(count):
            heapq.heappushpop(entries, (i * 0.7 % 997, i))

    for name, work, count in (
        ("SimPy timeouts", timeouts, 300_000),
        ("heap push and pop, 1,000 entries", heap, 1_000_000),
    ):
        yield name, count / _cpu(lambda work=work, count=count: work(count))


def run(case: Case, requests: list[Request], *, leaping: bool) -> None:
    """Simulate one case and print its line."""
    engine = case.engine(leaping=leaping)
    cpu = _cpu(lambda: run_clients(engine, requests, None))
    record = engine.record
    figures: dict[str, float] = {}
    metrics = _cpu(lambda: figures.update(summarize(record)))
    decodes = sum(record.steps.decode_seqs) / max(len(record.steps), 1)
    print(
        f"{case.name:<12}{'leaping' if leaping else 'stepping':<9}"
        f"{len(requests):>10,} requests{len(record.steps):>11,} steps{engine.leaps:>10,} leaps"
        f"{record.end:>10,.0f} sim s{cpu:>9.2f} CPU s{record.end / cpu:>9,.0f} sim s/s"
        f"{len(requests) / cpu:>10,.0f} req/s{decodes:>7.0f} decoding{figures['preemptions']:>9,}"
        f" preempted{metrics:>7.2f} CPU s metrics{_peak_mib():>7,.0f} MiB peak"
    )


def run_fleets() -> None:
    """Compare one replica with eight replicas behind a router: at the same total rate, and at the
    same rate per replica.
    """
    speeds: list[float] = []
    for replicas, rate in ((1, 34), (8, 34), (8, 8 * 34)):
        requests = generate_requests(Workload.model_validate(poisson(10_000, rate)), None)
        fleet = make_fleet(replicas)
        cpu = _cpu(lambda fleet=fleet, sent=requests: run_clients(fleet, sent, None))
        speeds.append(len(requests) / cpu)
        leaps = sum(lifetime.engine.leaps for lifetime in fleet.lifetimes)
        steps = sum(len(lifetime.engine.record.steps) for lifetime in fleet.lifetimes)
        print(
            f"{'fleet':<12}least_loaded{replicas:>3} replicas{rate:>5}/s{steps:>11,} steps"
            f"{leaps:>10,} leaps{cpu:>9.2f} CPU s{speeds[-1]:>10,.0f} req/s"
            f"{speeds[-1] / speeds[0]:>7.2f} of one replica"
        )


def run_hardware() -> None:
    """Compare a profile with four linear terms and a profile composed of operators."""
    hardware = make_hardware(find_gpu("H100-SXM"), find_architecture("Llama-3.1-8B"))
    config = vllm(16_000)
    made: list[CostProfile] = [load_profile("llama3-8b-class.json", HERE)]
    composing = _cpu(
        lambda: made.append(resolve_profile(hardware, find_execution_settings(config)))
    )
    again = _cpu(lambda: resolve_profile(hardware, find_execution_settings(config)))
    print(
        f"{'hardware':<12}composed in {composing:.2f} CPU s, found again in {1e6 * again:,.0f} us"
    )
    requests = generate_requests(Workload.model_validate(poisson(10_000, 34)), None)
    best = dict.fromkeys(range(len(made)), float("inf"))
    engines: dict[int, Engine] = {}
    # alternate between them, so that other load on the machine affects both equally
    for _ in range(7):
        for which, profile in enumerate(made):
            engine = Engine(
                simpy.Environment(), build_scheduler(config), SimulatedExecutor(profile)
            )
            engines[which] = engine
            cpu = _cpu(lambda engine=engine: run_clients(engine, requests, None))
            best[which] = min(best[which], cpu)
    for which, profile in enumerate(made):
        print(
            f"{'hardware':<12}{profile.basis:<32}{len(engines[which].record.steps):>11,} steps"
            f"{engines[which].leaps:>10,} leaps{best[which]:>9.2f} CPU s"
            f"{len(requests) / best[which]:>10,.0f} req/s"
            f"{best[which] / best[0]:>7.2f} of the CPU time per request of the first"
        )


def _cpu(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    names = sys.argv[1:] or [*(case.name for case in CASES), "fleet", "hardware"]
    for name, rate in floors():
        print(f"floor: {name}: {rate:,.0f} per CPU s")
    for case in CASES:
        if case.name not in names:
            continue
        if case.missing:
            print(f"{case.name:<12}left out: there is no {case.missing}")
            continue
        requests: list[Request] = []
        making = _cpu(lambda requests=requests, case=case: requests.extend(case.requests()))
        print(f"{case.name:<12}workload made in {making:.2f} CPU s")
        run(case, requests, leaping=True)
        if case.stepping:
            run(case, requests, leaping=False)
    if "fleet" in names:
        run_fleets()
    if "hardware" in names:
        run_hardware()


if __name__ == "__main__":
    main()
