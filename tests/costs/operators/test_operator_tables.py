"""Tests of the cleaning of operator tables, and of interpolation between their points."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from simkv.core.errors import InputError
from simkv.costs.operators.lookup.batch_length_plane import BatchLengthPlane
from simkv.costs.operators.lookup.collectives_lookup import lookup_all_reduce
from simkv.costs.operators.lookup.gemm_lookup import lookup_gemm
from simkv.costs.operators.operator_tables import TableStore, clean_rows, find_installed_tables
from simkv.costs.operators.piecewise_curve import make_nondecreasing

pytest.importorskip("pyarrow")


def table(root: Path, place: str, rows: list[dict[str, object]]) -> None:
    """Write a table; ``place`` is ``system/family/backend/version/table``."""
    path = root / f"{place}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path)


def product(m: int, n: int, k: int, latency: float) -> dict[str, object]:
    return {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": latency}


def test_interpolation_between_shapes_is_exact_for_operations_and_bytes(tmp_path: Path) -> None:
    rows = [
        product(m, n, k, 0.001 + 1e-9 * n * k + 1e-12 * m * n * k)
        for m in (1, 64)
        for n in (1024, 2048, 4096)
        for k in (1024, 4096)
    ]
    table(tmp_path, "x/gemm/vllm/1.0/gemm", rows)
    store = TableStore((tmp_path,), "x", "vllm", "1.0")
    for n, k in ((1024, 1024), (3000, 2000), (8000, 4096)):
        found = lookup_gemm(store, "bf16", n, k, 1e15)
        assert found is not None
        curve, known = found
        assert known
        for m in (1, 64):
            expected = 1e-3 * (0.001 + 1e-9 * n * k + 1e-12 * m * n * k)
            assert curve(m) == pytest.approx(expected)
    assert lookup_gemm(store, "nvfp4", 1024, 1024, 1e15) is None


def test_cleans_rows_by_all_four_rules(tmp_path: Path) -> None:
    """The rows include a product above peak speed, a row of another version, a host-bound row, and
    a batch that is faster than a smaller one.
    """
    shape = {"n": 64, "k": 64}
    own = [
        product(1, **shape, latency=0.200),  # host-bound: the other engine needs 0.010 ms
        product(2, **shape, latency=0.030),
        product(4, **shape, latency=0.020),  # faster than a smaller batch
        product(8, **shape, latency=1e-7),  # faster than the peak
        product(8, **shape, latency=0.040),
    ]
    table(tmp_path, "x/gemm/vllm/1.0/gemm", own)
    table(tmp_path, "x/gemm/vllm/2.0/gemm", [product(8, **shape, latency=0.050)])
    table(tmp_path, "x/gemm/sglang/1.0/gemm", [product(1, **shape, latency=0.010)])
    found = lookup_gemm(TableStore((tmp_path,), "x", "vllm", "1.0"), "bf16", 64, 64, 1e13)
    assert found is not None
    curve = found[0]
    assert dict(zip(curve.xs, curve.ys, strict=True)) == pytest.approx(
        {1: 1e-5, 2: 2e-5, 4: 2e-5, 8: 4e-5}
    )


def test_earlier_roots_replace_later_ones(tmp_path: Path) -> None:
    for root, latency in (("mine", 0.1), ("theirs", 0.2)):
        table(tmp_path / root, "x/gemm/vllm/1.0/gemm", [product(1, 64, 64, latency)])
    store = TableStore((tmp_path / "mine", tmp_path / "theirs"), "x", "vllm", "1.0")
    rows = store.rows("gemm", {})
    assert rows is not None
    assert rows["latency"].tolist() == [0.1]
    assert {path.parts[-6] for path in store.seen} == {"mine"}


def test_no_batch_costs_more_than_a_larger_batch() -> None:
    assert make_nondecreasing({1: 3.0, 2: 2.0, 4: 5.0}) == {4: 5.0, 2: 2.0, 1: 2.0}
    plane = BatchLengthPlane({(1, 1): 3.0, (1, 2): 2.0, (2, 1): 1.0, (2, 2): 4.0}, float)
    assert [plane(b, n) for b, n in ((1, 1), (1, 2), (2, 1), (2, 2))] == [1.0, 2.0, 1.0, 4.0]
    assert plane(4, 2) == 8.0
    assert plane(2, 8) == 16.0


def test_replaces_known_host_bound_rows() -> None:
    """vLLM 0.24.0 on B200: fp8-block products take 170 to 280 us for any size up to 2,048
    tokens.
    """
    root = find_installed_tables()
    if root is None:
        pytest.skip("needs the tables: pip install 'simkv[hardware]'")
    store = TableStore((root,), "b200_sxm", "vllm", "1.0")
    where = {"gemm_dtype": "fp8_block", "n": 4096, "k": 7168}
    rows = store.rows("gemm", where)
    assert rows is not None
    raw = rows.groupby("m")["latency"].min()
    assert raw[1] > 0.17
    assert raw[2048] < 1.1 * raw[8]
    found = lookup_gemm(store, "fp8_block", 4096, 7168, 4.5e15)
    assert found is not None
    curve = found[0]
    # Reading 29 MB of weights at 8 TB/s takes 3.7 us; the table of another engine has 13 us.
    assert curve(1) < 2e-5
    assert curve(2048) > 2 * curve(1)
    assert list(curve.ys) == sorted(curve.ys)
    whole = store.rows("gemm", {"gemm_dtype": "fp8"})
    assert whole is not None
    falling = whole.groupby(["n", "k", "m"])["latency"].min().groupby(level=[0, 1])
    assert falling.apply(lambda s: bool((s.diff() < 0).any())).mean() > 0.9


def test_replaces_all_reduces_of_hosts_with_slow_links() -> None:
    """L40S: four GPUs have a fifth of the bandwidth of two in vLLM's tables, but not in
    SGLang's.
    """
    root = find_installed_tables()
    if root is None:
        pytest.skip("needs the tables: pip install 'simkv[hardware]'")
    store = TableStore((root,), "l40s", "vllm", "0.24.0")
    numbers = 1 << 24
    raw = {}
    for gpus in (2, 4):
        rows = store.rows("custom_allreduce", {"num_gpus": gpus, "message_size": numbers})
        assert rows is not None
        raw[gpus] = rows["latency"].min()
    assert raw[4] > 7 * raw[2]
    two, four, eight = (lookup_all_reduce(store, gpus, graph=True) for gpus in (2, 4, 8))
    assert two
    assert four
    assert eight
    # A ring sends 2 (n - 1) / n of the message over each link: 1.5 times as much for four GPUs as
    # for two.
    assert 1.0 < four(numbers) / two(numbers) < 1.6
    assert 1.0 < eight(numbers) / two(numbers) < 1.9


def test_custom_link_tables_are_not_compared_with_published_ones(tmp_path: Path) -> None:
    for place, latency in (("mine/x/comm/vllm", 9.0), ("theirs/x/comm/sglang", 1.0)):
        rows = [
            {"num_gpus": 4, "message_size": n, "kernel_source": "y_graph", "latency": n * latency}
            for n in (128, 256, 512)
        ]
        table(tmp_path, f"{place}/1.0/custom_allreduce", rows)
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    own = lookup_all_reduce(TableStore((mine, theirs), "x", "vllm", "1.0"), 4, graph=True)
    assert own
    assert own(256) == pytest.approx(256 * 9e-3)


def test_empty_table_yields_no_times() -> None:
    assert clean_rows(None, None, ("m",)) == {}


def test_reports_unusable_tables_by_path(tmp_path: Path) -> None:
    store = TableStore((tmp_path,), "x", "vllm", "1.0")
    table(tmp_path, "x/gemm/vllm/1.0/gemm", [{"m": 1}])
    with pytest.raises(InputError, match=r"gemm_perf\.parquet: missing column 'latency'"):
        store.rows("gemm", {})
    broken = tmp_path / "x/moe/vllm/1.0/moe_perf.parquet"
    broken.parent.mkdir(parents=True)
    broken.write_text("no table")
    with pytest.raises(InputError, match=r"moe_perf\.parquet: cannot be read as a table"):
        store.rows("moe", {})
