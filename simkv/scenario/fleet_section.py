"""The ``fleet`` section of a scenario, as typed models."""

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

#: More replicas than this are refused as typos.
MAX_REPLICAS = 10_000

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0)]
ReplicaCount = Annotated[int, Field(gt=0, le=MAX_REPLICAS)]


class _Router(Section):
    """A way to find a replica, which says its name even where only what is said is dumped."""

    name: str

    @model_serializer(mode="wrap")
    def _named(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"name": self.name, **fields(self)}


class RoundRobinConfig(_Router):
    """Each replica in its turn."""

    name: Literal["round_robin"] = "round_robin"


class RandomConfig(_Router):
    """Any replica, all equally likely."""

    name: Literal["random"] = "random"
    seed: Seed = 0
    """Of the draw."""


class _Scored(_Router):
    """A router that reads loads.

    The score of a replica is the sum of what waits, runs, is ``in_flight`` (sent by the router and
    not ended, which it always knows) and the share of KV blocks in use, each times its weight.
    Between two refreshes ``count_own_sends`` counts each request that the router sends as one more
    that waits there.
    """

    waiting_weight: Weight = 4.0
    """How much one request that waits adds to a replica's score."""
    running_weight: Weight = 1.0
    """How much one that runs adds."""
    in_flight_weight: Weight = 0.0
    """How much one adds that the router has sent and that has not ended."""
    kv_weight: Weight = 0.0
    """How much the share of KV blocks in use adds."""
    count_own_sends: bool = True
    """Whether what the router sends counts as waiting until the next refresh."""


class LeastLoadedConfig(_Scored):
    """The replica of the lowest score; of equals the first."""

    name: Literal["least_loaded"] = "least_loaded"


class PowerOfTwoConfig(_Scored):
    """Of two replicas drawn at random the one of the lower score; of equals the one drawn first."""

    name: Literal["power_of_two"] = "power_of_two"
    seed: Seed = 0
    """Of the draw."""


class _Affine(_Router):
    """A router that keeps requests together unless that overloads a replica.

    The fleet is out of balance when the replica with the most requests in flight has more than
    ``balance_abs_threshold`` more than the one with the fewest and more than
    ``balance_rel_threshold`` times as many.
    """

    balance_abs_threshold: Weight = 64.0
    """Out of balance needs so many more requests in flight on the fullest replica than on the
    emptiest."""
    balance_rel_threshold: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.5
    """And so many times as many."""


class SessionConfig(_Affine):
    """The same replica for all requests of a session, by consistent hashing.

    If the fleet is out of balance and that replica is the fullest, the one with the fewest requests
    in flight.
    """

    name: Literal["session"] = "session"


class CacheAwareConfig(_Affine):
    """The replica that was sent the longest prefix of the prompt, if that is more of it than
    ``cache_threshold``; else the one that was sent the fewest distinct prefixes. If the fleet is
    out of balance, the one with the fewest requests in flight.

    Prefixes are compared in pieces of ``block_size`` tokens.
    """

    name: Literal["cache_aware"] = "cache_aware"
    cache_threshold: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Share of the prompt that a replica must have been sent before to get it for that."""
    block_size: Annotated[int, Field(gt=0)] = 16
    """Tokens in the pieces by which prompts are compared."""


RouterConfig = (
    RoundRobinConfig
    | RandomConfig
    | LeastLoadedConfig
    | PowerOfTwoConfig
    | SessionConfig
    | CacheAwareConfig
)


def _bare_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


AnyRouter = Annotated[
    Annotated[RouterConfig, Field(discriminator="name")],
    BeforeValidator(_bare_name, json_schema_input_type=str | RouterConfig),
]


class Outage(Section):
    """A replica takes no requests from ``at`` (s) until ``back_at``, or for good."""

    replica: Annotated[int, Field(ge=0)]
    """Which replica, from 0."""
    at: Seconds
    """When it goes (s)."""
    back_at: Seconds | None = None
    """When it comes back (s); left out, never."""

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        if self.back_at is not None and self.back_at <= self.at:
            raise ValueError(f"back_at {self.back_at:g} must be later than at {self.at:g}")
        return self


class Autoscale(Section):
    """The number of replicas follows the load, as Kubernetes' horizontal pod autoscaler has it.

    Every ``interval`` (s) the fleet wants as many replicas as bring the ``metric`` (requests that
    wait, run, or are in flight) down to ``target`` on each, within ``min_replicas`` and
    ``max_replicas``; a difference of less than ``tolerance`` is let be. A new replica takes
    requests after ``lag`` and the fleet's ``cold_start``. One too many is drained, and only when
    the fleet has wanted fewer for ``scale_down_after`` (s).

    Rule and defaults of interval, tolerance and scale-down: kubernetes/kubernetes,
    ``pkg/controller/podautoscaler`` (15 s, 0.1 and 300 s).
    """

    metric: Literal["waiting", "running", "in_flight"] = "in_flight"
    """Which requests are counted as load."""
    target: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """How many of them each replica is to have."""
    min_replicas: ReplicaCount = 1
    """Never fewer than this."""
    max_replicas: ReplicaCount
    """Never more than this."""
    interval: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 15.0
    """Seconds from one look at the load to the next."""
    lag: Seconds = 0.0
    """Seconds until a replica that was asked for is there; its cold start comes on top."""
    tolerance: Weight = 0.1
    """A load that is off the target by less than this share is let be."""
    scale_down_after: Seconds = 300.0
    """Seconds for which fewer must have been enough before one is drained."""

    @model_validator(mode="after")
    def _least_and_most(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} must be at most max_replicas {self.max_replicas}"
            )
        return self


class KvTransfer(Section):
    """How KV gets from a replica that prefills to one that decodes.

    A transfer takes ``bytes_per_token`` for each token that the target has not cached, at
    ``bandwidth`` (bytes/s), and ``latency`` (s) more. Transfers from one replica, or with
    ``shared_link`` from all, go one after the other.
    """

    bytes_per_token: Annotated[int, Field(gt=0)]
    """KV of one token."""
    bandwidth: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Of a link, in bytes per second."""
    latency: Seconds = 0.0
    """Seconds that every transfer takes on top."""
    shared_link: bool = False
    """Whether all transfers go over one link, rather than one from each replica."""


class FleetSettings(Section):
    """How requests find their replica, and when there are how many.

    ``refresh_interval`` (s): the router sees loads as they were at the last multiple of it; with 0
    as they are. With ``lockstep`` every step of a replica is one of all and lasts as long as the
    slowest, as with the data-parallel ranks of a mixture-of-experts model.

    A replica that fails loses its KV and all that it computes. ``on_failure`` says what becomes of
    its requests: ``retry`` sends them to another replica, which begins anew (what their clients had
    received is thrown away), ``lose`` gives them up. One that drains takes no new requests, and
    goes on with those it has. While no replica is there, requests wait at the router.

    ``cold_start`` (s) passes before a replica that comes back, or is added, takes requests; its
    cache is empty. With ``start_cold`` so it is at the start of the run.

    Where groups of replicas have the roles ``prefill`` and ``decode``, a request is prefilled on
    one of the first, which emits its first token and keeps the KV until it has been fetched by
    one of the second, chosen by ``decode_router``. ``kv_transfer`` says how long that takes.
    """

    router: AnyRouter = RoundRobinConfig()
    """How a request finds its replica; a name, or a mapping with the router's own knobs."""
    refresh_interval: Seconds = 0.0
    """The router sees loads as old as the last multiple of so many seconds; 0 is always fresh."""
    lockstep: bool = False
    """Whether every step of one replica is one of all, as long as the slowest."""
    failures: list[Outage] = Field(default=[])
    """Replicas that lose their KV and all that they compute."""
    drains: list[Outage] = Field(default=[])
    """Replicas that end what they have and take no more."""
    on_failure: Literal["retry", "lose"] = "retry"
    """What becomes of the requests of a replica that fails: sent to another one, or lost."""
    cold_start: Seconds = 0.0
    """Seconds before a replica that comes back, or is added, takes requests."""
    start_cold: bool = False
    """Whether that holds at the start of the run, too."""
    autoscale: Autoscale | None = None
    """Replicas that come and go with the load."""
    decode_router: AnyRouter = LeastLoadedConfig()
    """How a request that was prefilled finds the replica that decodes it."""
    kv_transfer: KvTransfer | None = None
    """How KV gets from one to the other."""


class ReplicaGroup(Section):
    """``count`` equal replicas.

    ``engine`` and ``hardware`` say what differs from the scenario's, ``profile`` what their steps
    cost if that is not as the scenario says. With the ``role`` of ``prefill`` or ``decode`` they
    do only that.
    """

    count: ReplicaCount = 1
    """How many equal replicas."""
    role: Literal["both", "prefill", "decode"] = "both"
    """What they do: all, only prefill, or only decode."""
    engine: AnyEngine | None = None
    """What differs from the scenario's engine."""
    hardware: HardwareSection | None = None
    """What differs from the scenario's hardware."""
    profile: str | None = None
    """What their steps cost, if not as the scenario says."""

    @model_validator(mode="after")
    def _costs_are_said_once(self) -> Self:
        if self.profile is not None and self.hardware is not None:
            raise ValueError("profile: found beside hardware; only one of the two is possible")
        return self


class FleetSection(FleetSettings):
    """Replicas behind a router: a number of equal ones, or a list of groups."""

    replicas: Annotated[
        Annotated[ReplicaCount, Tag("number")]
        | Annotated[list[ReplicaGroup], Field(min_length=1), Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "number"),
    ] = 1
    """How many, or a list of groups that differ."""

    @property
    def groups(self) -> list[ReplicaGroup]:
        """The groups of replicas, of which there is one if all are equal."""
        if isinstance(self.replicas, int):
            return [ReplicaGroup(count=self.replicas)]
        return self.replicas

    @property
    def size(self) -> int:
        """Replicas at the start."""
        return sum(group.count for group in self.groups)

    @property
    def disaggregated(self) -> bool:
        """Whether some replicas prefill and others decode."""
        return any(group.role != "both" for group in self.groups)

    def _check_roles(self) -> None:
        roles = {group.role for group in self.groups}
        if not self.disaggregated:
            if self.kv_transfer:
                raise ValueError("kv_transfer: there are no replicas of roles prefill and decode")
            return
        if roles != {"prefill", "decode"}:
            raise ValueError(
                f"replicas: roles {', '.join(sorted(roles))}; expected prefill and decode, or none"
            )
        if not self.kv_transfer:
            raise ValueError("kv_transfer: missing; replicas of roles prefill and decode need it")
        for name in ("failures", "drains", "autoscale", "start_cold", "lockstep"):
            if getattr(self, name):
                raise ValueError(f"{name}: not with replicas of roles prefill and decode")

    @field_validator("failures", "drains")
    @classmethod
    def _one_at_a_time(cls, outages: list[Outage]) -> list[Outage]:
        until: dict[int, float] = {}
        for outage in sorted(outages, key=lambda outage: outage.at):
            if outage.at < until.get(outage.replica, 0.0):
                raise ValueError(f"two at one time of replica {outage.replica}; expected one")
            until[outage.replica] = inf if outage.back_at is None else outage.back_at
        return outages

    @model_validator(mode="after")
    def _of_replicas_that_are_there(self) -> Self:
        most = self.size if self.autoscale is None else self.autoscale.max_replicas
        for name in ("failures", "drains"):
            for outage in getattr(self, name):
                if outage.replica >= most:
                    raise ValueError(
                        f"{name}: there is no replica {outage.replica}; expected one from 0 to "
                        f"{most - 1}"
                    )
        if self.lockstep and (self.failures or self.drains or self.autoscale or self.start_cold):
            raise ValueError("lockstep: replicas in lock-step are there from the start to the end")
        self._check_roles()
        if self.autoscale is None:
            return self
        if not isinstance(self.replicas, int):
            raise ValueError("autoscale needs equal replicas; expected a number for replicas")
        least = self.autoscale.min_replicas
        if not least <= self.replicas <= most:
            raise ValueError(
                f"replicas: {self.replicas} must be from min_replicas {least} to max_replicas "
                f"{most} of autoscale"
            )
        return self
