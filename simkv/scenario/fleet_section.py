"""Typed models of the ``fleet`` section of a scenario."""

from __future__ import annotations

from math import inf
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from simkv.scenario.base_section import Section
from simkv.scenario.engine_section import AnyEngine
from simkv.scenario.hardware_section import HardwareSection

#: Maximum number of replicas; larger numbers are rejected as typos.
MAX_REPLICAS = 10_000

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0)]
ReplicaCount = Annotated[int, Field(gt=0, le=MAX_REPLICAS)]


class _Router(Section):
    """Base class of router settings."""

    name: str

    @model_serializer(mode="wrap")
    def _named(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"name": self.name, **fields(self)}


class RoundRobinConfig(_Router):
    """Send requests to the replicas in turn."""

    name: Literal["round_robin"] = "round_robin"


class RandomConfig(_Router):
    """Send each request to a random replica."""

    name: Literal["random"] = "random"
    seed: Seed = 0
    """Random seed."""


class _Scored(_Router):
    """Base class of routers that compare the load of replicas.

    The score of a replica is a weighted sum of its waiting requests, its running requests, its
    requests in flight and its fraction of used KV blocks. Requests in flight are all unfinished
    requests that the router has sent to the replica. With ``count_own_sends``, requests sent since
    the last refresh also count as waiting.
    """

    waiting_weight: Weight = 4.0
    """Weight of each waiting request in the score of a replica."""
    running_weight: Weight = 1.0
    """Weight of each running request."""
    in_flight_weight: Weight = 0.0
    """Weight of each request that the router has sent and that has not finished."""
    kv_weight: Weight = 0.0
    """Weight of the fraction of KV blocks in use."""
    count_own_sends: bool = True
    """Whether requests that the router has sent count as waiting until the next refresh of the
    load."""


class LeastLoadedConfig(_Scored):
    """Send each request to the replica with the lowest score. Ties go to the first replica."""

    name: Literal["least_loaded"] = "least_loaded"


class PowerOfTwoConfig(_Scored):
    """Sample two replicas and send the request to the one with the lower score.

    Ties go to the replica that was sampled first.
    """

    name: Literal["power_of_two"] = "power_of_two"
    seed: Seed = 0
    """Random seed."""


class _Affine(_Router):
    """Base class of routers that send related requests to one replica while the fleet is balanced.

    The fleet is imbalanced if the numbers of requests in flight on two replicas differ by more than
    ``balance_abs_threshold`` and by more than the factor ``balance_rel_threshold``.
    """

    balance_abs_threshold: Weight = 64.0
    """Threshold of load imbalance: difference between the largest and the smallest number of
    requests in flight on a replica."""
    balance_rel_threshold: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.5
    """Threshold of load imbalance: largest number of requests in flight on a replica, divided by
    the smallest number."""


class SessionConfig(_Affine):
    """Send all requests of a session to the same replica, by consistent hashing.

    If the fleet is imbalanced, the replica with the most requests in flight is replaced by the one
    with the fewest.
    """

    name: Literal["session"] = "session"
    max_in_flight: Annotated[int, Field(gt=0)] | None = None
    """Number of requests in flight at which a replica is full. Further requests go to the next
    replica on the hash ring that is not full or, if all are full, to the original replica. Default:
    no limit."""


class PrefixKnowledge(_Router):
    """Base class of routers that know which prefixes the replicas have cached.

    With ``exact`` and ``events``, all replicas that the router can choose must run engine ``vllm``
    with prefix caching. Blocks then have the size of the engine's blocks.
    """

    prefix_knowledge: Literal["approximate", "exact", "events"] = "approximate"
    """How the router knows the cached prefixes. ``approximate``: by the prompts that it has sent.
    ``exact``: from the prefix caches at the time of routing. ``events``: by the blocks that entered
    or left the prefix caches at least ``event_delay`` ago, as the KV event indexers of llm-d and
    Dynamo do."""
    event_delay: Seconds = 0.0
    """Time until the router knows of a block that entered or left a prefix cache (s). Requires
    ``prefix_knowledge: events``."""

    @property
    def reads_caches(self) -> bool:
        """Whether the router reads the prefix caches of the replicas."""
        return self.prefix_knowledge != "approximate"

    @model_validator(mode="after")
    def _delays_events(self) -> Self:
        if self.event_delay and self.prefix_knowledge != "events":
            raise ValueError(
                f"event_delay: requires prefix_knowledge: events, got {self.prefix_knowledge}"
            )
        return self


class CacheAwareConfig(_Affine, PrefixKnowledge):
    """Send a request to the replica that has received the longest prefix of its prompt.

    The prefix must be longer than ``cache_threshold`` times the prompt. Without such a prefix, the
    replica with the fewest distinct prefixes is used. If the fleet is imbalanced, the replica with
    the fewest requests in flight is used. Prefixes are compared in chunks of ``block_size`` tokens.
    ``prefix_knowledge`` replaces received prefixes by cached prefixes.
    """

    name: Literal["cache_aware"] = "cache_aware"
    cache_threshold: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Smallest fraction of the prompt that must match a cached prefix, between 0 and 1."""
    block_size: Annotated[int, Field(gt=0)] = 16
    """Number of tokens per chunk in which prompts are compared."""


class WeightedConfig(PrefixKnowledge):
    """Send each request to the replica with the highest weighted sum of three scores from 0 to 1.

    The scores are from llm-d's router. ``queue`` is 1 for the replica with the fewest waiting
    requests, 0 for the replica with the most, and linear between them. ``kv`` is the fraction of
    free KV blocks. ``prefix`` is the fraction of the prompt's blocks that the router has already
    sent to the replica or, with another ``prefix_knowledge``, that the replica has cached. Ties are
    broken at random.
    """

    name: Literal["weighted"] = "weighted"
    queue_weight: Weight = 2.0
    """Weight of the score of the queue."""
    kv_weight: Weight = 2.0
    """Weight of the score of KV blocks that are not in use."""
    prefix_weight: Weight = 3.0
    """Weight of the score of the prefix."""
    block_size: Annotated[int, Field(gt=0)] = 64
    """Tokens per block when prompts are compared."""
    count_own_sends: bool = False
    """Whether requests that the router has sent count as waiting until the next refresh of the
    load."""
    seed: Seed = 0
    """Random seed for ties."""


class SessionAdmissionConfig(_Router):
    """Hold the requests of sessions whose contexts do not fit into the replicas.

    Source: ThunderAgent (arXiv 2602.13692) and its plugin for llm-d's router
    (llm-d/llm-d-router#2964). Each admitted session occupies its context on one replica, also while
    the session is idle. A new session is admitted if its context fits and no session is paused.
    Every ``interval`` (s), replicas above ``capacity_tokens`` pause their smallest idle sessions,
    and paused sessions that fit are resumed. The router holds the requests of paused sessions.
    Replicas cannot fail, drain or be scaled.
    """

    name: Literal["session_admission"] = "session_admission"
    capacity_tokens: Annotated[int, Field(gt=0)]
    """Tokens of context that fit into one replica: KV blocks times block size."""
    half_life: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Half-life of the context of idle sessions when the router decides which sessions to resume
    (s). ThunderAgent uses 1 s if its decay is on. Default: no decay; sessions that ended then count
    until they are paused."""
    buffer_tokens: Annotated[int, Field(ge=0)] = 100
    """Tokens that are added to the context of each session."""
    first_estimate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Estimated divided by real tokens of the prompts that arrive before the first answer.
    ThunderAgent assumes five characters per token until then."""
    interval: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """Interval at which sessions are resumed and paused (s)."""
    forced_after: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1800.0
    """Time after which a held request is sent, whether its session fits or not (s)."""


RouterConfig = (
    RoundRobinConfig
    | RandomConfig
    | LeastLoadedConfig
    | PowerOfTwoConfig
    | SessionConfig
    | CacheAwareConfig
    | WeightedConfig
    | SessionAdmissionConfig
)


def _bare_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


AnyRouter = Annotated[
    Annotated[RouterConfig, Field(discriminator="name")],
    BeforeValidator(_bare_name, json_schema_input_type=str | RouterConfig),
]


class Outage(Section):
    """A period in which a replica gets no new requests.

    The period lasts from ``at`` to ``back_at`` (s), or to the end of the run.
    """

    replica: Annotated[int, Field(ge=0)]
    """Index of the replica, from 0."""
    at: Seconds
    """Start of the outage (s)."""
    back_at: Seconds | None = None
    """End of the outage (s); if omitted, the replica does not return."""

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        if self.back_at is not None and self.back_at <= self.at:
            raise ValueError(f"back_at: must be later than at ({self.at:g}), got {self.back_at:g}")
        return self


class Autoscale(Section):
    """Adjust the number of replicas to the load, as Kubernetes' horizontal pod autoscaler does.

    Every ``interval`` (s), the desired number of replicas is computed: with this number, the
    ``metric`` (waiting, running or in-flight requests) per replica equals ``target``. Relative
    deviations below ``tolerance`` are ignored. A new replica gets requests after ``lag`` plus the
    fleet's ``cold_start`` (s). Replicas are removed if fewer replicas have sufficed for
    ``scale_down_after`` (s). A removed replica first finishes its requests.

    Source of the rule and of the defaults of interval, tolerance and scale-down:
    kubernetes/kubernetes, ``pkg/controller/podautoscaler`` (15 s, 0.1 and 300 s).
    """

    metric: Literal["waiting", "running", "in_flight"] = "in_flight"
    """Kind of requests that count as load."""
    target: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Target load per replica, in requests."""
    min_replicas: ReplicaCount = 1
    """Minimum number of replicas."""
    max_replicas: ReplicaCount
    """Maximum number of replicas."""
    interval: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 15.0
    """Interval between evaluations of the load (s)."""
    lag: Seconds = 0.0
    """Time to provision a replica (s), in addition to its cold start."""
    tolerance: Weight = 0.1
    """Relative deviation from the target that does not change the number of replicas."""
    scale_down_after: Seconds = 300.0
    """Time for which a smaller number of replicas must be sufficient before a replica is drained
    (s)."""

    @model_validator(mode="after")
    def _least_and_most(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas: must be at most max_replicas ({self.max_replicas}), "
                f"got {self.min_replicas}"
            )
        return self


class KvTransfer(Section):
    """Time to transfer KV from a prefill replica to a decode replica.

    A transfer moves ``bytes_per_token`` bytes for each token that the target has not cached, at
    ``bandwidth`` (bytes/s), and takes an additional ``latency`` (s). A replica sends one transfer
    at a time. With ``shared_link``, all replicas together send one transfer at a time.
    """

    bytes_per_token: Annotated[int, Field(gt=0)]
    """KV bytes per token."""
    bandwidth: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Bandwidth of a link (bytes/s)."""
    latency: Seconds = 0.0
    """Additional time per transfer (s)."""
    shared_link: bool = False
    """Use one link for all transfers instead of one link per source replica."""


class FleetSettings(Section):
    """Routing of requests, outages and scaling of replicas.

    The router reads the load of the replicas every ``refresh_interval`` (s), or at each request if
    the interval is 0. With ``lockstep``, all replicas start each step together and wait for the
    slowest replica, as the data-parallel ranks of a mixture-of-experts model do.

    A replica that fails loses its KV and all computed tokens. With ``on_failure: retry``, its
    requests restart on another replica and lose the tokens that were already sent. With ``lose``,
    its requests are dropped. A draining replica finishes its requests and gets no new ones.
    Requests wait at the router while no replica is available.

    A replica that returns or is added gets requests after ``cold_start`` (s), with an empty cache.
    With ``start_cold``, this also applies at the start of the run.

    Groups of replicas with the roles ``prefill`` and ``decode`` disaggregate the two phases. A
    prefill replica computes the prompt and emits the first token. A decode replica, chosen by
    ``decode_router``, fetches the KV and continues. ``kv_transfer`` is the time of the transfer.
    """

    router: AnyRouter = RoundRobinConfig()
    """Routing policy: a name, or a mapping with the router's settings."""
    refresh_interval: Seconds = 0.0
    """Interval at which the router reads the load of the replicas (s); with 0, it reads the load at
    each request."""
    lockstep: bool = False
    """Whether all replicas start each step together and wait for the slowest replica."""
    failures: list[Outage] = Field(default=[])
    """Outages in which a replica loses its KV and all computed tokens."""
    drains: list[Outage] = Field(default=[])
    """Outages in which a replica finishes its requests and accepts no new requests."""
    on_failure: Literal["retry", "lose"] = "retry"
    """Treatment of the requests of a failed replica: restart on another replica, or drop."""
    cold_start: Seconds = 0.0
    """Time until a returning or added replica accepts requests (s)."""
    start_cold: bool = False
    """Whether the cold start applies at the start of the run as well."""
    autoscale: Autoscale | None = None
    """Automatic scaling of the number of replicas with the load."""
    decode_router: AnyRouter = LeastLoadedConfig()
    """Routing policy that selects the decode replica for a prefilled request."""
    kv_transfer: KvTransfer | None = None
    """Time to transfer KV from prefill to decode replicas."""


class ReplicaGroup(Section):
    """Group of ``count`` equal replicas.

    ``engine``, ``hardware`` and ``profile`` override the scenario's values. With the ``role``
    ``prefill`` or ``decode``, the replicas only prefill or only decode.
    """

    count: ReplicaCount = 1
    """Number of equal replicas."""
    role: Literal["both", "prefill", "decode"] = "both"
    """Work of the replicas: prefill and decode (``both``), only prefill, or only decode."""
    engine: AnyEngine | None = None
    """Overrides of the scenario's engine."""
    hardware: HardwareSection | None = None
    """Overrides of the scenario's hardware."""
    profile: str | None = None
    """Cost profile of the group, if it differs from the profile of the scenario."""

    @model_validator(mode="after")
    def _costs_are_said_once(self) -> Self:
        if self.profile is not None and self.hardware is not None:
            raise ValueError("profile: cannot be combined with hardware")
        return self


class FleetSection(FleetSettings):
    """Replicas behind a router: a number of equal replicas, or a list of groups."""

    replicas: Annotated[
        Annotated[ReplicaCount, Tag("number")]
        | Annotated[list[ReplicaGroup], Field(min_length=1), Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "number"),
    ] = 1
    """Number of replicas, or a list of groups with different settings."""

    @property
    def groups(self) -> list[ReplicaGroup]:
        """Groups of replicas; a single group if all replicas are equal."""
        if isinstance(self.replicas, int):
            return [ReplicaGroup(count=self.replicas)]
        return self.replicas

    @property
    def size(self) -> int:
        """Number of replicas at the start."""
        return sum(group.count for group in self.groups)

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode run on separate replicas."""
        return any(group.role != "both" for group in self.groups)

    def _check_roles(self) -> None:
        roles = {group.role for group in self.groups}
        if not self.disaggregated:
            if self.kv_transfer:
                raise ValueError("kv_transfer: requires replicas with roles prefill and decode")
            return
        if roles != {"prefill", "decode"}:
            raise ValueError(
                "replicas: either use both roles, prefill and decode, or no roles; found "
                f"{', '.join(sorted(roles))}"
            )
        if not self.kv_transfer:
            raise ValueError(
                "kv_transfer: missing; replicas with roles prefill and decode require it"
            )
        for name in ("failures", "drains", "autoscale", "start_cold", "lockstep"):
            if getattr(self, name):
                raise ValueError(f"{name}: cannot be combined with roles prefill and decode")

    def _check_admission(self) -> None:
        if isinstance(self.decode_router, SessionAdmissionConfig):
            raise ValueError(
                "decode_router: must not be session_admission, which is supported "
                "only by the field router"
            )
        if not isinstance(self.router, SessionAdmissionConfig):
            return
        if self.disaggregated:
            raise ValueError(
                "router: session_admission cannot be combined with roles prefill and decode"
            )
        for name in ("failures", "drains", "autoscale", "start_cold", "lockstep"):
            if getattr(self, name):
                raise ValueError(f"{name}: cannot be combined with the router session_admission")

    @field_validator("failures", "drains")
    @classmethod
    def _one_at_a_time(cls, outages: list[Outage]) -> list[Outage]:
        until: dict[int, float] = {}
        for outage in sorted(outages, key=lambda outage: outage.at):
            if outage.at < until.get(outage.replica, 0.0):
                raise ValueError(
                    f"replica {outage.replica} has two outages at the same time; expected at "
                    "most one"
                )
            until[outage.replica] = inf if outage.back_at is None else outage.back_at
        return outages

    @model_validator(mode="after")
    def _of_replicas_that_are_there(self) -> Self:
        most = self.size if self.autoscale is None else self.autoscale.max_replicas
        for name in ("failures", "drains"):
            for outage in getattr(self, name):
                if outage.replica >= most:
                    raise ValueError(
                        f"{name}: replica {outage.replica} does not exist; expected 0 to {most - 1}"
                    )
        if self.lockstep and (self.failures or self.drains or self.autoscale or self.start_cold):
            raise ValueError("lockstep: cannot be combined with failing or scaled replicas")
        self._check_roles()
        self._check_admission()
        if self.autoscale is None:
            return self
        if not isinstance(self.replicas, int):
            raise ValueError("autoscale requires equal replicas; set replicas to a number")
        least = self.autoscale.min_replicas
        if not least <= self.replicas <= most:
            raise ValueError(
                f"replicas: must be between min_replicas ({least}) and max_replicas ({most}) "
                f"of autoscale, got {self.replicas}"
            )
        return self
