"""Packaged costs of API servers: CPU time per request and per token, by engine and release."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from simkv.core.engine_version import find_version, is_since


@dataclass(frozen=True)
class FrontEndCosts:
    """CPU time of an API server, in seconds.

    ``request_s`` is the time per request, ``prompt_token_s`` the time per prompt token, and
    ``output_token_s`` the time per token sent to a client. ``processes`` is the number of server
    processes. ``latency_s`` is an additional delay of each request that uses no CPU time.
    """

    request_s: float = 0.0
    prompt_token_s: float = 0.0
    output_token_s: float = 0.0
    latency_s: float = 0.0
    processes: int = 1


class PackagedFrontEnd(NamedTuple):
    """Costs of an engine from release ``since`` on. The costs of gpt-oss models are separate."""

    engine: str
    since: str
    costs: FrontEndCosts
    gpt_oss: FrontEndCosts


def _packaged(engine: str, since: str, request_ms: float, token_us: float) -> PackagedFrontEnd:
    costs = FrontEndCosts(request_ms / 1e3, 2e-6, token_us / 1e6, 0.005)
    return PackagedFrontEnd(
        engine, since, costs, replace(costs, request_s=min(costs.request_s, 0.002))
    )


#: Newest first, for chat completions that are streamed.
#:
#: - vLLM up to 0.11 and SGLang: fitted by hand to public bursts of 1,000 prompts of 128 tokens,
#:   whose first tokens arrive together when all prompts have been read. One request takes 5.5 to 22
#:   ms on vLLM 0.11.0 (four servers). The highest rate within a second was 8,000 to 9,800 tokens
#:   on four vLLM servers of different speed, and 20,000 on SGLang.
#: - vLLM from 0.12 on: no public burst was found; the time per request is an assumption.
#: - gpt-oss: 2 ms, because these requests have no chat template (``openai_harmony``).
#: - 5 ms without CPU time, and 2 microseconds per prompt token: assumptions.
PACKAGED = (
    _packaged("vllm", "0.12", 3.0, 80.0),
    _packaged("vllm", "0", 10.0, 110.0),
    _packaged("sglang", "0", 4.5, 50.0),
)


#: Factor between the packaged times and those of a real server, in both directions: one request
#: takes 5.5 to 22 ms on four servers of vLLM 0.11.0, and 10 ms here.
SPREAD = 2.0


def find_front_end(engine: str, release: str, model: str = "") -> FrontEndCosts | None:
    """Return the packaged costs of an engine's release, or None if the engine was not measured."""
    known = find_version(release)
    for one in PACKAGED:
        if one.engine == engine and (known is None or is_since(release, one.since)):
            return one.gpt_oss if "gpt-oss" in model.lower() else one.costs
    return None
