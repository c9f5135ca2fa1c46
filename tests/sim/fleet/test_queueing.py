"""Compare simulations with closed forms of queueing theory.

The step costs make a replica a plain server: a step takes ``STEP`` seconds and a request needs one
step per token. A replica with ``max_num_seqs: 1`` is a single server; with c, it is a station of c
servers. If the step time is proportional to the batch size, the replica shares its time among all
requests. Service times are whole numbers of steps, ``MEAN`` on average.

A fleet of single servers is checked request by request against D. Lindley's recursion (1952). The
recursion is checked against closed forms with many requests, without a simulation. Other closed
forms are compared with the mean of independent simulated repeats, whose standard error must be
below 3 % of the theoretical value. The tolerance is three standard errors plus the effect of whole
steps, because requests start only between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import factorial, fsum, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import simpy

from simkv.core.request import Request
from simkv.costs.cost_profile import CostProfile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.scenario.fleet_section import (
    LeastLoadedConfig,
    PowerOfTwoConfig,
    RandomConfig,
    RoundRobinConfig,
    RouterConfig,
)
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.vllm.config import VllmConfig
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.fleet.routers import build_router
from simkv.sim.run_record import RunRecord

STEP = 0.01
#: Mean service time in steps, and 1 in seconds.
MEAN = 100
WARM_UP = 250

Lengths = Callable[[np.random.Generator, int], npt.NDArray[np.int64]]


def geometric(draw: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    """Sample service times from an exponential distribution, in whole steps."""
    return draw.geometric(1 / MEAN, count)


def constant(draw: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    return np.full(count, MEAN)


def of_two_kinds(draw: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    """Sample hyperexponential service times: 10 % are 9.1 times as long (squared coefficient of
    variation 2).
    """
    return np.where(draw.random(count) < 0.1, 503, 55)


def costs(*terms: dict[str, Any]) -> CostProfile:
    return CostProfile.model_validate(
        {
            "name": "server",
            "engine": "any",
            "model": "none",
            "gpu": "none",
            "basis": "assumed",
            "terms": [{"name": str(i), **term} for i, term in enumerate(terms)],
            "idle_pass_s": 0.001,
            "range": {},
            "fit": {"points": 0},
            "source": ["by definition"],
        }
    )


#: Step costs with equal times for every step.
SERVERS = costs({"feature": "steps", "seconds": STEP})
#: Step costs proportional to the batch size.
SHARED = costs(
    {"feature": "decode_seqs", "seconds": STEP}, {"feature": "prefill_seqs", "seconds": STEP}
)


def run(
    arrivals: npt.NDArray[np.float64],
    tokens: npt.NDArray[np.int64],
    servers: int = 1,
    profile: CostProfile = SERVERS,
    replicas: int = 1,
    router: RouterConfig | None = None,
) -> tuple[RunRecord, Fleet]:
    """Simulate a fleet that receives requests with these output lengths."""
    config = VllmConfig(
        max_num_seqs=servers,
        num_gpu_blocks=100_000,
        max_model_len=100_000,
        max_num_batched_tokens=100_000,
        enable_prefix_caching=False,
        async_scheduling=False,
    )

    def make(env: Any, rank: int) -> Engine:
        return Engine(env, build_scheduler(config), SimulatedExecutor(profile), rank=rank)

    requests = [
        Request(i, 1, n, at, output_tokens=n)
        for i, (at, n) in enumerate(zip(arrivals.tolist(), tokens.tolist(), strict=True))
    ]
    chosen = build_router(router or RoundRobinConfig(), lambda prompt: prompt.id)
    fleet = Fleet(simpy.Environment(), [make] * replicas, chosen)
    return run_clients(fleet, requests, None), fleet


def sojourn(
    rate: float,
    lengths: Lengths,
    *,
    servers: int = 1,
    profile: CostProfile = SERVERS,
    replicas: int = 1,
    router: RouterConfig | None = None,
    count: int = 2500,
    repeats: int = 8,
) -> tuple[float, float]:
    """Return the mean time in the fleet (s) over the repeats, and its standard error."""
    means = []
    for repeat in range(repeats):
        draw = np.random.default_rng(repeat)
        arrivals = np.cumsum(draw.exponential(1 / rate, count))
        tokens = lengths(draw, count)
        record, fleet = run(arrivals, tokens, servers, profile, replicas, router)
        times = [life.ended_at - life.request.arrival for life in record.requests.values()]
        means.append(float(np.mean(times[WARM_UP:])))
        assert fleet.in_system_s == pytest.approx(fsum(times), rel=1e-9), "Little's law"
    return float(np.mean(means)), float(np.std(means, ddof=1) / sqrt(repeats))


def check(found: tuple[float, float], theory: float, steps: float) -> None:
    """Check the mean against theory; it may deviate by ``steps`` steps."""
    mean, error = found
    assert error < 0.03 * theory, "too few repeats to tell anything"
    assert abs(mean - theory) < 3 * error + steps * STEP, f"{mean} +- {error}, theory {theory}"


def pollaczek_khinchine(rate: float, lengths: Sequence[float]) -> float:
    """Return the mean time in an M/G/1 queue with mean service time 1."""
    second = float(np.mean(np.square(np.asarray(lengths) * STEP)))
    return 1 + rate * second / (2 * (1 - rate))


def erlang_c(rate: float, servers: int) -> float:
    """Return the mean time in an M/M/c queue with mean service time 1 (A. K. Erlang, 1917)."""
    load = rate
    all_busy = load**servers / factorial(servers) * servers / (servers - load)
    below = sum(load**n / factorial(n) for n in range(servers))
    return all_busy / (below + all_busy) / (servers - load) + 1


def gi_m_1(transform: Callable[[float], float]) -> float:
    """Return the mean time in a GI/M/1 queue with service rate 1 (D. G. Kendall), from the
    transform of the gaps between arrivals.
    """
    sigma = 0.5
    for _ in range(200):
        sigma = transform(1 - sigma)
    return 1 / (1 - sigma)


def lindley(
    arrivals: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the departure times at a single server (s), in order of arrival."""
    ends, free = [], 0.0
    for arrival, service in zip(arrivals.tolist(), (tokens * STEP).tolist(), strict=True):
        free = max(arrival, free) + service
        ends.append(free)
    return np.array(ends)


@pytest.mark.parametrize("lengths", [geometric, constant, of_two_kinds])
@pytest.mark.parametrize(
    "router", [RoundRobinConfig(), RandomConfig()], ids=["in turn", "at random"]
)
def test_single_server_matches_lindley_recursion(router: RouterConfig, lengths: Lengths) -> None:
    draw, servers, count = np.random.default_rng(7), 3, 600
    arrivals = np.cumsum(draw.exponential(1 / (0.95 * servers), count))
    tokens = lengths(draw, count)
    record, fleet = run(arrivals, tokens, replicas=servers, router=router)
    at = np.array([fleet.sent[i][0] for i in range(count)])
    found = np.array([record.requests[i].ended_at for i in range(count)])
    for server in range(servers):
        mine = at == server
        assert found[mine] == pytest.approx(lindley(arrivals[mine], tokens[mine]), rel=1e-9)
    if isinstance(router, RoundRobinConfig):
        assert at.tolist() == [i % servers for i in range(count)]
    else:
        # Choices are independent of the previous choice: all pairs occur equally often.
        pairs = np.bincount(at[:-1] * servers + at[1:], minlength=servers**2)
        assert abs(pairs - count / servers**2).max() < 4 * sqrt(count / servers**2)


def by_recursion(rate: float, lengths: Lengths, turns: int = 1) -> tuple[float, float]:
    """Return the result of ``sojourn`` for a server that receives every ``turns``-th request, from
    the recursion.
    """
    means = []
    for repeat in range(40):
        draw = np.random.default_rng(repeat)
        arrivals = np.cumsum(draw.exponential(1 / rate, 5000 * turns))[::turns]
        times = lindley(arrivals, lengths(draw, len(arrivals))) - arrivals
        means.append(float(np.mean(times[WARM_UP:])))
    return float(np.mean(means)), float(np.std(means, ddof=1) / sqrt(len(means)))


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_m_m_1(rate: float) -> None:
    check(by_recursion(rate, geometric), 1 / (1 - rate), steps=1)


def test_m_d_1() -> None:
    check(by_recursion(0.7, constant), pollaczek_khinchine(0.7, [MEAN]), steps=0.01)


def test_m_g_1_wait_grows_with_service_variance() -> None:
    theory = pollaczek_khinchine(0.5, [503] + 9 * [55])
    check(by_recursion(0.5, of_two_kinds), theory, steps=1)
    assert theory > 1.5 * pollaczek_khinchine(0.5, [MEAN])


def test_round_robin_regularizes_arrivals() -> None:
    """With four replicas, the gap between arrivals at a replica is the sum of four exponential
    gaps: E4/M/1.
    """
    theory = gi_m_1(lambda s: (2.8 / (2.8 + s)) ** 4)
    check(by_recursion(2.8, geometric, turns=4), theory, steps=1)
    assert theory < 0.75 * 1 / (1 - 0.7)


@pytest.mark.parametrize(("rate", "servers"), [(3.5, 5)])
def test_m_m_c(rate: float, servers: int) -> None:
    found = sojourn(rate, geometric, servers=servers, repeats=4)
    check(found, erlang_c(rate, servers), steps=1)


@pytest.mark.parametrize(("lengths", "repeats"), [(geometric, 5), (of_two_kinds, 8)])
def test_processor_sharing_is_insensitive_to_distribution(lengths: Lengths, repeats: int) -> None:
    """In M/G/1 with processor sharing, the mean time is 1 / (1 - load) for any distribution."""
    found = sojourn(0.5, lengths, servers=1000, profile=SHARED, repeats=repeats)
    # An arriving request waits for the end of a step; the duration of this step is proportional to
    # the batch size.
    check(found, 1 / (1 - 0.5), steps=2)


SHORTEST = partial(PowerOfTwoConfig, waiting_weight=0.0, running_weight=0.0, in_flight_weight=1.0)


def test_power_of_two_choices() -> None:
    """For very many replicas (N.

    Vvedenskaya, R. Dobrushin, F. Karpelevich, 1996; M. Mitzenmacher, 2001), the mean time is
    the sum of load ** (2 ** i - 2); 40 replicas are within 2 % of it.
    """
    load = 0.7
    mean, error = sojourn(
        40 * load, geometric, replicas=40, router=SHORTEST(), count=6000, repeats=3
    )
    theory = fsum(load ** (2**i - 2) for i in range(1, 12))
    assert error < 0.015 * theory
    assert abs(mean - theory) < 0.02 * theory + 3 * error + STEP
    assert theory < 0.6 / (1 - load)


def test_shortest_queue_is_between_shared_queue_and_random() -> None:
    shortest = LeastLoadedConfig(waiting_weight=0.0, running_weight=0.0, in_flight_weight=1.0)
    mean, error = sojourn(2.4, geometric, replicas=4, router=shortest, repeats=4)
    one_queue, apart = erlang_c(2.4, 4), 1 / (1 - 0.6)
    assert one_queue < mean - 3 * error
    assert mean + 3 * error < 0.6 * apart
