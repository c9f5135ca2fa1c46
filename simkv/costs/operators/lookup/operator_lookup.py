"""Operator times measured on a GPU, with estimates for missing ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from simkv.core.errors import InputError
from simkv.costs.hardware.model_architecture import Gqa, Mla
from simkv.costs.hardware.number_formats import find_number_format
from simkv.costs.operators.kernel_table import Kernel
from simkv.costs.operators.lookup import attention_lookup, collectives_lookup, mla_lookup
from simkv.costs.operators.lookup.delta_net_lookup import lookup_delta_net
from simkv.costs.operators.lookup.elementwise_lookup import lookup_elementwise
from simkv.costs.operators.lookup.experts_lookup import find_kernel_spread, lookup_experts
from simkv.costs.operators.lookup.gemm_lookup import lookup_gemm
from simkv.costs.operators.operator_tables import TableStore
from simkv.costs.operators.operator_times import (
    Collective,
    DeltaNetShape,
    Lookup,
    MoeShape,
)
from simkv.costs.operators.piecewise_curve import Curve
from simkv.costs.operators.roofline import Roofline

T = TypeVar("T")


class MeasuredOperators:
    """Operator times from the measured tables in ``store``. Missing times come from ``sheet``.

    ``sheet`` estimates times from the data sheet. ``kernels`` are the engine's kernels. ``notes``
    lists estimated and substituted operators. ``points`` is the number of operators in the tables.
    ``unmeasured`` are the kernels without measurements. ``expert_spread`` contains the smallest and
    the largest log(time / used time) of the experts over all possible kernels. Both are 0 if the
    kernel is known.
    """

    def __init__(
        self, store: TableStore, sheet: Roofline, kernels: Mapping[str, Kernel | None] | None = None
    ) -> None:
        self._kernels = kernels or {}
        self.unmeasured: dict[str, None] = {}
        self.expert_spread = (0.0, 0.0)
        self._store = store
        self._sheet = sheet
        self._seen: set[Path] = set()
        self.notes: dict[str, None] = {}
        self.points = 0

    def gemm(self, form: str, n: int, k: int) -> Curve:
        weights = find_number_format(form)
        flops = self._sheet.gpu.peak_flops(weights.activations)
        kernel = self._kernels.get(f"products in {form}")
        found: Curve | None = self._checked(
            kernel, self._ask(lookup_gemm, form, n, k, flops, kernel)
        )
        if found is None and form != "bf16":
            wide = self._ask(lookup_gemm, "bf16", n, k, self._sheet.gpu.flops)
            if wide is not None:
                found = _weight_only(wide[0], weights.bytes / 2)
                self.notes[f"products in {form}: bf16 times, corrected for smaller weights"] = None
        return self._or(found, f"products in {form}", lambda: self._sheet.gemm(form, n, k))

    def _checked(self, kernel: Kernel | None, found: tuple[Any, ...] | None) -> Any:
        """Return a lookup result without its last value, and record an unmeasured kernel."""
        if kernel is not None and not (found and found[-1]):
            self.unmeasured[kernel.name] = None
            self.notes[f"kernel not in the tables: {kernel.name}"] = None
        if found is None:
            return None
        return found[0] if len(found) == 2 else found[:-1]

    def prefill(self, shape: Gqa, kv: str) -> Lookup:
        bits = 16 if kv == "bf16" else 8
        kernel, flops = self._kernels.get("attention"), self._sheet.gpu.peak_flops(bits)
        found: tuple[Lookup, str] | None = self._checked(
            kernel, self._ask(attention_lookup.lookup_prefill, shape, kv, flops, kernel)
        )
        return self._or_noted(found, "prefill attention", lambda: self._sheet.prefill(shape, kv))

    def decode(self, shape: Gqa, kv: str) -> Lookup:
        kernel, bandwidth = self._kernels.get("attention"), self._sheet.gpu.bandwidth
        found: tuple[Lookup, str] | None = self._checked(
            kernel, self._ask(attention_lookup.lookup_decode, shape, kv, bandwidth, kernel)
        )
        return self._or_noted(found, "decode attention", lambda: self._sheet.decode(shape, kv))

    def mla_prefill(self, shape: Mla, hidden: int, form: str, kv: str) -> Lookup:
        if shape.sparse:
            module = self._ask(mla_lookup.lookup_sparse_mla, shape, hidden, form, kv, context=True)
            return self._or_noted(
                module,
                "sparse prefill attention",
                lambda: self._sheet.mla_prefill(shape, hidden, form, kv),
            )
        return self._or(
            self._ask(mla_lookup.lookup_mla_core, shape, kv, context=True),
            "MLA of prompts",
            lambda: self._sheet.mla_prefill(shape, hidden, form, kv),
        )

    def mla_decode(self, shape: Mla, hidden: int, form: str, kv: str) -> Lookup:
        if shape.sparse:
            module = self._ask(mla_lookup.lookup_sparse_mla, shape, hidden, form, kv, context=False)
            return self._or_noted(
                module,
                "sparse decode attention",
                lambda: self._sheet.mla_decode(shape, hidden, form, kv),
            )
        return self._or(
            self._ask(mla_lookup.lookup_mla_core, shape, kv, context=False),
            "MLA of decodes",
            lambda: self._sheet.mla_decode(shape, hidden, form, kv),
        )

    def absorbed(self, shape: Mla) -> Curve:
        """Return the time of the two absorbed projections of MLA decodes by number of tokens."""
        found = self._ask(mla_lookup.lookup_absorbed_projections, shape.heads)
        return self._or(found, "absorbed projections", lambda: self._sheet.absorbed(shape))

    def experts(self, shape: MoeShape, form: str) -> Curve:
        flops = self._sheet.gpu.peak_flops(find_number_format(form).activations)
        kernel = self._kernels.get(f"experts in {form}")
        asked = self._ask(lookup_experts, shape, form, flops, kernel)
        found: tuple[Curve, str] | None = self._checked(kernel, asked)
        if kernel is None:
            low, high = self._ask(find_kernel_spread, shape, form, flops)
            self.expert_spread = min(self.expert_spread[0], low), max(self.expert_spread[1], high)
        return self._or_noted(found, f"experts in {form}", lambda: self._sheet.experts(shape, form))

    def delta(self, shape: DeltaNetShape, phase: Literal["context", "generation"]) -> Curve:
        found = self._ask(lookup_delta_net, shape, phase)
        return self._or_noted(found, "gated delta net", lambda: self._sheet.delta(shape, phase))

    def all_reduce(self, gpus: int, numbers: int, *, graph: bool) -> Curve:
        found = None
        if self._own_link:
            found = self._ask(collectives_lookup.lookup_all_reduce, gpus, graph=graph)
        return self._or(
            found and found.of(numbers),
            f"all-reduce of {gpus} GPUs over {self._sheet.link.kind}",
            lambda: self._sheet.all_reduce(gpus, numbers, graph=graph),
        )

    def collective(self, name: Collective, gpus: int, numbers: int) -> Curve:
        found = self._ask(collectives_lookup.lookup_nccl, name, gpus) if self._own_link else None
        return self._or(
            found and found.of(numbers),
            f"{name} of {gpus} GPUs over {self._sheet.link.kind}",
            lambda: self._sheet.collective(name, gpus, numbers),
        )

    def elementwise(self, nbytes: float) -> Curve:
        moved = self._ask(lookup_elementwise)
        return self._or(
            moved and moved.of(nbytes),
            "memory-bound kernels",
            lambda: self._sheet.elementwise(nbytes),
        )

    def versions(self) -> list[str]:
        """Return the sorted backends and versions of the tables that were read."""
        return sorted({f"{path.parts[-3]} {path.parts[-2]}" for path in self._seen})

    def _ask(self, lookup: Callable[..., T], *args: Any, **named: Any) -> T:
        found, seen = _looked_up(self._store, lookup, args, tuple(sorted(named.items())))
        self._seen |= seen
        return found  # type: ignore[no-any-return]

    @property
    def _own_link(self) -> bool:
        """Whether the interconnect is the one on which the tables were measured."""
        return self._sheet.link == self._sheet.gpu.interconnect()

    def _or(self, found: T | None, what: str, estimate: Callable[[], T]) -> T:
        if found is not None:
            self.points += 1
            return found
        self.notes[f"{what}: estimated from the data sheet"] = None
        return estimate()

    def _or_noted(self, found: tuple[T, str] | None, what: str, estimate: Callable[[], T]) -> T:
        if found is not None and found[1]:
            self.notes[found[1]] = None
        return self._or(found and found[0], what, estimate)


@lru_cache(maxsize=4096)
def _looked_up(
    store: TableStore, lookup: Callable[..., Any], args: tuple[Any, ...], named: tuple[Any, ...]
) -> tuple[Any, frozenset[Path]]:
    """Return the cached result of a lookup and the files that it read."""
    own = TableStore(store.roots, store.system, store.backend, store.release)
    try:
        return lookup(own, *args, **dict(named)), frozenset(own.seen)
    except KeyError as error:
        files = ", ".join(sorted(map(str, own.seen))) or "the tables"
        raise InputError(f"{files}: missing column: {error}") from error


def _weight_only(wide: Curve, ratio: float) -> Curve:
    """Return the time of a matrix product with small weights that are converted to 16 bits.

    ``ratio`` is the size of the weights divided by their size in 16 bits. A compute-bound product
    takes as long as with 16-bit weights. A memory-bound product takes ``ratio`` times as long, and
    at least the time to read the weights.
    """
    read = wide.ys[0]
    return Curve(
        wide.xs, tuple(max(ratio * read, y if y > 1.5 * read else ratio * y) for y in wide.ys)
    )
