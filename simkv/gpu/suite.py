"""The scenarios that a profile is judged by on a real device, and how they are sized.

    cases = plan(profile, FULL, seconds=35.0)
    [(case.name, case.scenario.workload.size, case.predicted_s) for case in cases]

Rates, lengths of the runs and the pool that is under pressure are chosen with the profile itself,
before anything is served: so the plan and what the simulator predicts for it can be written down
first, and a wrong profile plans badly and is seen to. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simkv import zoo
from simkv.errors import InputError
from simkv.gpu.validate import simulate
from simkv.metrics import summary
from simkv.profile import Profile
from simkv.request import Request
from simkv.scenario import Scenario, load
from simkv.workload import Workload, clients

Document = dict[str, Any]
#: Preemptions that a run under memory pressure must have, and what is aimed at.
LEAST_PREEMPTIONS, WANTED_PREEMPTIONS = 50, 80
#: A run may take this much longer than predicted before its horizon ends it.
PATIENCE = 3.0


@dataclass(frozen=True)
class Scale:
    """Sizes in tokens: means of ``prompt`` and ``output``, of ``long_prompt`` and its
    ``short_output``, the ``longest`` request, the ``budget`` of a step; rows and blocks.

    Lengths of recorded and of published workloads are divided by ``divisor``.
    """

    prompt: int
    output: int
    long_prompt: int
    short_output: int
    longest: int
    budget: int
    max_num_seqs: int
    num_blocks: int
    block_size: int = 16
    divisor: int = 1


#: An 8B model on a large GPU, with a pool cut to 96,000 tokens.
FULL = Scale(300, 250, 2000, 64, 8000, 2048, 256, 6000)
#: The tiny model on a CPU.
SMALL = Scale(30, 20, 120, 8, 480, 128, 16, 400, divisor=10)


@dataclass(frozen=True)
class Case:
    """A scenario to be served; ``beside`` names the case that it is to be compared with.

    ``predicted`` are the figures that the profile foresees, as in ``summary.json``.
    """

    name: str
    stresses: str
    scenario: Scenario
    predicted: dict[str, Any]
    beside: str | None = None

    @property
    def predicted_s(self) -> float:
        """Seconds that serving it should take."""
        return float(self.predicted["makespan_s"])


def plan(profile: Profile, scale: Scale, seconds: float, seed: int = 0) -> list[Case]:
    """All cases, the most telling first, each of about ``seconds`` as ``profile`` sees it.

    Raises InputError where no pool is small enough for the preemptions that are wanted.
    """
    vllm = _vllm(scale)
    sized = _Sizes(profile, seconds, seed)
    decodes = sized.drawn(
        "decode-heavy", vllm, _lognormal(scale.prompt), _lognormal(scale.output), scale
    )
    prefills = sized.drawn(
        "prefill-heavy", vllm, _lognormal(scale.long_prompt), scale.short_output, scale
    )
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": scale.longest}
    pressed = sized.pressed(
        "memory-pressure",
        vllm,
        _uniform(scale.prompt // 2, 3 * scale.prompt // 2),
        _uniform(scale.output // 2, 2 * scale.output),
    )
    spikes = sized.spikes("bursty-trace", {**vllm, "enable_prefix_caching": True}, scale)
    found = [
        Case("decode-heavy", "batched decodes", decodes, {}),
        Case("memory-pressure", "preemption by recompute", pressed, {}),
        Case(
            "memory-pressure-swap",
            "preemption by swap",
            _engine(
                pressed,
                "memory-pressure-swap",
                variant="0.33.0-swap",
                num_cpu_blocks=scale.num_blocks // 4,
            ),
            {},
            beside="memory-pressure",
        ),
        Case("prefill-heavy", "chunks and mixed steps", prefills, {}),
        Case(
            "prefill-whole",
            "prompts in one piece",
            _engine(prefills, "prefill-whole", **whole),
            {},
            beside="prefill-heavy",
        ),
        *_incident(sized, scale, "mistralrs-six", "before"),
        *_incident(sized, scale, "mistralrs-forty", "before-fitted"),
        Case("bursty-trace", "spikes, shared prefixes", spikes, {}),
    ]
    return [sized.finished(case) for case in found]


def _incident(sized: _Sizes, scale: Scale, name: str, variant: str) -> list[Case]:
    """A packaged incident of mistral.rs before and after its fix, at the scale's block size."""
    original = load(zoo.packaged()[name])[variant]
    requests = clients(original.workload, original.timeout).requests
    engine: Any = original.engine
    blocks = (engine.num_gpu_blocks - 1) * engine.block_size // scale.block_size + 1
    knobs = {
        "name": "mistralrs",
        "block_size": scale.block_size,
        "num_gpu_blocks": min(blocks, scale.num_blocks),
        "max_num_seqs": min(engine.max_num_seqs, scale.max_num_seqs),
    }

    def of(variant: str) -> Callable[[int], Scenario]:
        rows = [_row(r, scale.divisor, timed=True) for r in requests]
        return lambda count: _scenario(
            f"{name}-{variant}",
            {**knobs, "variant": variant},
            {"requests": rows[:count]},
            timeout=original.timeout,
        )

    # Before the fix it takes longest; both must serve the same requests.
    count = sized.cut(of("bucketed"), len(requests))
    before, after = of("bucketed")(count), of("pr2034")(count)
    return [
        Case(before.name, "recompute at every length that differs", before, {}),
        Case(after.name, "the same after the fix", after, {}, beside=before.name),
    ]


@dataclass(frozen=True)
class _Sizes:
    """Chooses rates and numbers of requests by simulating with ``profile``."""

    profile: Profile
    seconds: float
    seed: int

    def drawn(
        self, name: str, engine: Document, prompt: Any, output: Any, scale: Scale, load: float = 0.7
    ) -> Scenario:
        """Poisson arrivals at a share ``load`` of what the engine can serve."""
        shape = {
            "prompt_tokens": _cut(prompt, scale.longest // 2),
            "output_tokens": _cut(output, scale.longest // 4),
        }
        return self._at_load(name, engine, shape, load)

    def pressed(self, name: str, engine: Document, prompt: Document, output: Document) -> Scenario:
        """The largest of some pools in which enough requests are preempted.

        If there is none, the run is made longer, to four times the seconds at most.
        """
        shape = {"prompt_tokens": prompt, "output_tokens": output}
        engine = {**engine, "max_model_len": prompt["high"] + output["high"]}
        least = engine["max_model_len"] // engine["block_size"] + 2
        for factor in (1, 2, 4):
            longer = replace(self, seconds=factor * self.seconds)
            calm = longer._at_load(name, engine, shape, 0.85)
            blocks = engine["num_gpu_blocks"]
            while blocks >= least:
                scenario = _engine(calm, name, num_gpu_blocks=blocks)
                if self._figures(scenario)["preemptions"] >= WANTED_PREEMPTIONS:
                    return scenario
                blocks = int(0.9 * blocks)
        raise InputError(
            f"{name}: no pool gives {WANTED_PREEMPTIONS} preemptions in {4 * self.seconds:g} s; "
            "a longer --budget is needed"
        )

    def spikes(self, name: str, engine: Document, scale: Scale) -> Scenario:
        """A packaged trace of spikes, its rate scaled to what the engine can serve."""
        path = packaged_trace("spikes.csv")
        workload = Workload.model_validate({"trace": path.name}, context={"folder": path.parent})
        requests = clients(workload, None).requests
        longest = scale.longest - 1
        rows = [
            row
            for r in requests
            if (row := _row(r, scale.divisor))["prompt_tokens"] + row["output_tokens"] < longest
        ]

        def of(count: int) -> Scenario:
            return _scenario(name, engine, {"requests": [dict(r) for r in rows[:count]]})

        sample = min(len(rows), 100)
        at_once = [{**row, "arrival": 0.0} for row in rows[:sample]]
        burst = self._figures(_scenario(name, engine, {"requests": at_once}))
        rate = 0.6 * sample / burst["makespan_s"]
        begin, end = rows[0]["arrival"], rows[-1]["arrival"]
        pace = len(rows) / (end - begin) / rate
        for row in rows:
            row["arrival"] = round((row["arrival"] - begin) * pace, 6)
        count = max(min(int(rate * self.seconds), len(rows)), 12)
        return of(self.cut(of, count))

    def cut(self, of: Callable[[int], Scenario], count: int) -> int:
        """As many requests, ``count`` at most, as are served in the time that there is."""
        while count > 6 and self._figures(of(count))["makespan_s"] > 1.3 * self.seconds:
            count = max(3 * count // 4, 6)
        return count

    def finished(self, case: Case) -> Case:
        """The case with what the profile predicts, and a horizon that ends it if all goes wrong."""
        predicted = self._figures(case.scenario)
        horizon = round(PATIENCE * predicted["makespan_s"] + 10.0, 3)
        scenario = case.scenario.model_copy(update={"horizon": horizon})
        return replace(case, scenario=scenario, predicted=predicted)

    def _at_load(self, name: str, engine: Document, shape: Document, load: float) -> Scenario:
        def of(count: int, rate: float) -> Scenario:
            arrivals = {"num_prompts": count, "request_rate": rate, "seed": self.seed, **shape}
            return _scenario(name, engine, {"arrivals": arrivals})

        sample = 64
        rate = load * sample / self._figures(of(sample, float("inf")))["makespan_s"]
        rate = float(f"{rate:.4g}")
        wanted = max(int(rate * self.seconds), 12)
        return of(self.cut(lambda count: of(count, rate), wanted), rate)

    def _figures(self, scenario: Scenario) -> dict[str, Any]:
        record = simulate(scenario, self.profile)
        return {**summary(record), "requests": scenario.workload.size}


def packaged_trace(name: str) -> Path:
    """A trace that comes with simkv. Raises InputError if it is not there."""
    package = Path(zoo.__file__).parent
    for folder in (package / "traces", package.parent / "traces"):
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"the trace {name} is not installed beside simkv")


def _vllm(scale: Scale) -> Document:
    """The engine of most cases; the runner does not overlap steps, so neither does it."""
    return {
        "name": "vllm",
        "block_size": scale.block_size,
        "num_gpu_blocks": scale.num_blocks,
        "max_num_seqs": scale.max_num_seqs,
        "max_num_batched_tokens": scale.budget,
        "max_model_len": scale.longest,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }


def _scenario(
    name: str, engine: Mapping[str, Any], workload: Document, timeout: float | None = None
) -> Scenario:
    document = {"name": name, "engine": engine, "workload": workload, "profile": "unit-step"}
    return Scenario.model_validate({**document, "timeout": timeout})


def _engine(scenario: Scenario, name: str, **knobs: Any) -> Scenario:
    engine = replace(scenario.engine, **knobs)
    return scenario.model_copy(update={"name": name, "engine": engine})


def _row(r: Request, divisor: int, *, timed: bool = False) -> Document:
    """A request as a scenario lists it, its lengths divided; with ``timed`` its arrival too."""
    row: Document = {
        "arrival": r.arrival / (divisor if timed else 1),
        "prompt_tokens": max(r.prompt_tokens // divisor, 1),
        "output_tokens": max(r.output_tokens // divisor, 2),
    }
    shared = [s for s in r.segments if not s.stream.startswith("u")]
    if shared and (tokens := min(shared[0].end // divisor, row["prompt_tokens"])):
        row |= {"prefix_group": shared[0].stream[1:], "prefix_tokens": tokens}
    return row


def _lognormal(mean: int) -> Document:
    return {"distribution": "lognormal", "mean": mean, "sigma": 0.7}


def _uniform(low: int, high: int) -> Document:
    return {"distribution": "uniform", "low": low, "high": high}


def _cut(lengths: Any, most: int) -> Any:
    return {**lengths, "max": most} if isinstance(lengths, dict) else lengths
