"""Tests of bundles of kernel tables with artificial values, so that every result can be checked by
hand.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, StepCost
from simkv.costs.cost_terms import compute_feature
from simkv.costs.hardware.host_links import (
    HostLink,
    find_link,
    links,
    parse_link,
)
from simkv.costs.sources.launch_overhead import DEFAULT_LAUNCH_S, launch_time, without_host
from simkv.costs.sources.llmservingsim_profile import Sharding, bundle_profile, scale_collectives
from simkv.costs.step_load import StepLoad

META = """\
vllm_version: 0.19.0
gpu: Test GPU
model: test/model
skew_fit:
  enabled: {skew}
  bucket_axes:
    n_bins: [0, 2, 1000]
    n_labels: [few, many]
    skew_rate_bins: [-0.01, 0.5, 1.01]
    skew_rate_labels: [low, high]
    kv_big_bins: [0, 250, 1000]
    kv_big_labels: [short, long]
    kp_bins: [-1, 0, 1000]
    kp_labels: [none, some]
  per_tp:
    1: {{alpha_default: 0.25}}
"""
FREE = [
    (layer, 0)
    for layer in ("final_layernorm", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
]
DENSE = "layer,tokens,time_us\n" + "".join(
    f"{layer},{tokens},{time * tokens}\n"
    for layer, time in (("embedding", 1), ("layernorm", 2), ("qkv_proj", 10), *FREE)
    for tokens in (1, 4, 16)
)
SEQUENCES = "layer,sequences,time_us\nlm_head,1,100\nlm_head,9,180\nsampler,1,5\n"
ATTENTION = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n" + "".join(
    f"{p},0,{n},{c},{p + n * c / 10}\n"
    for p in (0, 10, 30)
    for n in (0, 1, 3)
    for c in ((100, 200, 300) if n else (0,))
    if p or n
)
FIT = (
    "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples\n0,many,low,long,none,0.5,4\n"
)


def bundle(folder: Path, skew: bool = False, **changed: str) -> Path:
    (folder / "tp1").mkdir(parents=True)
    (folder / "meta.yaml").write_text(META.format(skew=str(skew).lower()))
    files = {"dense": DENSE, "per_sequence": SEQUENCES, "attention": ATTENTION, "skew_fit": FIT}
    for name, text in {**files, **changed}.items():
        (folder / "tp1" / f"{name}.csv").write_text(text)
    return folder


def test_step_time_is_the_sum_over_all_layers(tmp_path: Path) -> None:
    profile = bundle_profile(bundle(tmp_path), Sharding(2))
    step = StepCost(profile)(StepLoad(0, 0, 0, 3, 600, 0, 3))
    # In us: the kernels of a step, and two layers with two norms each.
    dense = 3 * 1 + 2 * (2 * 3 * 2 + 3 * 10)
    assert step == pytest.approx(1e-6 * (dense + 120 + 5 + 2 * 60))
    assert (profile.basis, profile.model, profile.gpu) == ("measured", "test/model", "Test GPU")
    assert profile.range["decode_mean"] == (100, 300)
    assert profile.range["prefill_tokens"] == (10, 30)


def test_padded_steps_cost_the_padded_tokens(tmp_path: Path) -> None:
    plain = bundle_profile(bundle(tmp_path), Sharding(2))
    padded = bundle_profile(tmp_path, Sharding(2), [1, 2, 4])
    three, four = (StepLoad(0, 0, 0, n, 200 * n, 0, n) for n in (3, 4))
    extra = StepCost(padded)(three) - StepCost(plain)(three)
    assert extra == pytest.approx(1e-6 * (1 + 2 * (2 * 2 + 10)))
    assert StepCost(padded)(four) == StepCost(plain)(four)


def test_steps_above_the_largest_graph_add_launch_time(tmp_path: Path) -> None:
    plain = bundle_profile(bundle(tmp_path), Sharding(2))
    padded = bundle_profile(tmp_path, Sharding(2), [1, 2, 4])
    four, five = (StepLoad(0, 0, 0, n, 200 * n, 0, n) for n in (4, 5))
    assert StepCost(padded)(four) == StepCost(plain)(four)
    assert StepCost(padded)(five) - StepCost(plain)(five) == pytest.approx(DEFAULT_LAUNCH_S)
    assert "5.9 ms of host time" in " ".join(padded.source)
    assert "no host time" in " ".join(plain.source)
    kernels = without_host(padded)
    assert StepCost(kernels)(five) == pytest.approx(StepCost(plain)(five))
    assert without_host(plain) is plain


def test_launch_time_depends_on_the_gpu() -> None:
    assert launch_time("NVIDIA GeForce RTX 4090") == launch_time("rtx-4090") == 0.0
    assert launch_time("RTX PRO 6000") == 5.9e-3
    assert launch_time("H100-SXM") == launch_time("an unknown GPU") == DEFAULT_LAUNCH_S


def test_zero_launch_time_adds_no_term(tmp_path: Path) -> None:
    meta = bundle(tmp_path) / "meta.yaml"
    meta.write_text(meta.read_text().replace("Test GPU", "RTX 4090"))
    profile = bundle_profile(tmp_path, Sharding(2), [1, 2, 4])
    assert without_host(profile) is profile
    assert "no host time" in " ".join(profile.source)


def test_lockstep_ranks_are_padded_to_the_largest_rank() -> None:
    sizes = [1, 2, 4, 8]
    alone = StepLoad(0, 0, 0, 3, 600, 0, 3)
    beside = alone._replace(group_tokens=9, group_most=6, group_ranks=2)
    assert [compute_feature(load, "slots", sizes) for load in (alone, beside)] == [4, 8]
    assert [compute_feature(load, "group_tokens", sizes) for load in (alone, beside)] == [3, 16]
    # If one rank exceeds the largest graph, no rank runs a graph, and no rank is padded.
    eager = alone._replace(group_tokens=103, group_most=100, group_ranks=2)
    assert compute_feature(eager, "slots", sizes) == 4
    assert compute_feature(eager, "group_tokens", sizes) == 103
    assert compute_feature(beside, "group_tokens") == 9  # no graphs, no padding


def test_held_out_errors_come_from_excluded_points(tmp_path: Path) -> None:
    errors = bundle_profile(bundle(tmp_path), Sharding(2)).fit.held_out
    assert errors["decode"].p95 == pytest.approx(0, abs=1e-9)  # the table is linear
    bent = ATTENTION.replace("0,0,3,200,60.0", "0,0,3,200,90.0")
    profile = bundle_profile(bundle(tmp_path / "bent", attention=bent), Sharding(2))
    step = StepCost(profile)(StepLoad(0, 0, 0, 3, 600, 0, 3))
    assert profile.fit.held_out["decode"].bias == pytest.approx(-60e-6 / step / 2)


def test_skew_applies_only_if_the_bundle_enables_it(tmp_path: Path) -> None:
    load = StepLoad(0, 0, 0, 3, 600, 0, 3, 150, 300)
    off, on = (
        StepCost(bundle_profile(bundle(tmp_path / str(skew), skew), Sharding(1)))(load)
        for skew in (False, True)
    )
    assert on - off == pytest.approx(0.5 * 30e-6)


def test_experts_are_selected_uniformly_from_the_tokens_of_all_ranks(tmp_path: Path) -> None:
    moe = "tokens,activated_experts,time_us\n" + "".join(
        f"{t},{a},{t + 10 * a}\n" for t in (1, 64) for a in (1, 16)
    )
    plain = StepCost(bundle_profile(bundle(tmp_path / "plain"), Sharding(2)))
    bundle(tmp_path, moe=moe)
    with pytest.raises(InputError, match="contains expert times, but the model has no"):
        bundle_profile(tmp_path, Sharding(2))
    one = StepCost(bundle_profile(tmp_path, Sharding(2, experts=16, experts_per_token=2)))
    load = StepLoad(0, 0, 0, 1, 200, 0, 1)
    # A token selects two experts.
    assert one(load) - plain(load) == pytest.approx(2e-6 * (1 + 10 * 2))
    two = bundle_profile(tmp_path, Sharding(2, experts=16, experts_per_token=2, expert_ranks=2))
    assert "no all_gather of 2 GPUs, no reduce_scatter" in " ".join(two.source)
    cost = StepCost(two)
    # Two tokens in total: this rank has half of the experts and of the selections.
    found = cost(load._replace(group_tokens=2)) - plain(load)
    assert found == pytest.approx(2e-6 * (1 + 10 * 8 * (1 - (7 / 8) ** 2)))
    assert cost(load._replace(group_tokens=128)) > cost(load._replace(group_tokens=2))


def test_adds_collectives_of_known_gpus(tmp_path: Path) -> None:
    (bundle(tmp_path) / "tp1").rename(tmp_path / "tp2")
    meta = META.format(skew="false").replace("Test GPU", "RTX PRO 6000 Blackwell Server")
    (tmp_path / "meta.yaml").write_text(meta)
    layout = Sharding(2, tp=2, hidden=2048)
    with_them = StepCost(bundle_profile(tmp_path, layout))
    without = StepCost(bundle_profile(tmp_path, Sharding(2, tp=2)))
    load = StepLoad(0, 0, 0, 1, 200, 0, 1)  # 4096 bytes of hidden states
    assert with_them(load) - without(load) == pytest.approx(4 * 12.713e-6)


def test_given_link_replaces_catalog_collectives(tmp_path: Path) -> None:
    (bundle(tmp_path) / "tp1").rename(tmp_path / "tp2")
    link = HostLink(name="slow", latency=2e-5, bandwidth=1.6e10, source="test")
    layout = Sharding(2, tp=2, hidden=2048, link=link)
    profile = bundle_profile(tmp_path, layout)
    without = StepCost(bundle_profile(tmp_path, Sharding(2, tp=2)))
    # 4 MiB of hidden states; half of them travel around the ring twice.
    load = StepLoad(1, 1024, 0, 0, 0, 1, 1)
    took = 4 * (2e-5 + 4194304 / 1.6e10)
    assert StepCost(profile)(load) - without(load) == pytest.approx(took)
    assert "collectives: slow, 20 us and 16 GB/s (test)" in " ".join(profile.source)
    twice = scale_collectives(profile, 2.0)
    assert twice is not None
    assert StepCost(twice)(load) - without(load) == pytest.approx(2 * took)
    assert scale_collectives(bundle_profile(tmp_path, Sharding(2, tp=2)), 2.0) is None


def test_all_gathers_include_ids_and_weights_of_selected_experts(tmp_path: Path) -> None:
    moe = "tokens,activated_experts,time_us\n1,1,1\n1,16,1\n64,1,1\n64,16,1\n"
    bundle(tmp_path, moe=moe)
    link = HostLink(name="l", latency=1e-5, bandwidth=1e9, source="test")
    known = Sharding(2, 1, 2048, 16, 2, 2, link)
    load = StepLoad(1, 4096, 0, 0, 0, 1, 1)
    none = StepCost(bundle_profile(tmp_path, Sharding(2, 1, None, 16, 2, 2)))(load)
    hidden, chosen = 1e-5 + 4096 * 4096 / 1e9, 1e-5 + 4096 * 8 / 1e9
    found = StepCost(bundle_profile(tmp_path, known))(load) - none
    assert found == pytest.approx(2 * (2 * hidden + 2 * chosen))


def test_parses_links_by_name_or_by_latency_and_bandwidth() -> None:
    assert parse_link("PCIe 5.0, no peer-to-peer").bandwidth == 1.6e10
    link = parse_link("20,16")
    assert (link.latency, link.bandwidth) == (pytest.approx(2e-5), 1.6e10)
    for wrong in ("20", "20,x", "20,0", "-1,16", "20,16,1", "nan,16"):
        with pytest.raises(InputError, match=r"unknown link.*latency_us and bandwidth_gb_s"):
            parse_link(wrong)


def test_known_links_have_names_and_sources() -> None:
    assert find_link("pcie 5.0, NO peer-to-peer").bandwidth == 1.6e10
    assert all(link.source for link in links())
    with pytest.raises(InputError, match=r"unknown link 'PCI'.*latency_us"):
        find_link("PCI")


def test_reports_tables_without_rows(tmp_path: Path) -> None:
    bundle(tmp_path, dense="layer,tokens,time_us\n")
    with pytest.raises(InputError, match=r"dense.csv: contains no rows"):
        bundle_profile(tmp_path, Sharding(2))
    cut = "\n".join(line for line in ATTENTION.splitlines() if not line.startswith("0,"))
    other = bundle(tmp_path / "cut", attention=cut + "\n")
    with pytest.raises(InputError, match=r"attention.csv: contains no row with only decodes"):
        bundle_profile(other, Sharding(2))


def test_plain_and_compressed_tables_give_equal_profiles(tmp_path: Path) -> None:
    before = bundle_profile(bundle(tmp_path), Sharding(2))
    for path in (tmp_path / "tp1").glob("*.csv"):
        (path.parent / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert bundle_profile(tmp_path, Sharding(2)) == before
    assert CostProfile.model_validate_json(before.model_dump_json()) == before


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"dense": DENSE + "warp_drive,1,3\n"}, r"dense.csv: unknown layer 'warp_drive'"),
        ({"dense": "layer,tokens\nembedding,1\n"}, r"dense.csv: missing column 'time_us'"),
        ({"dense": DENSE + "embedding,x,3\n"}, r"dense.csv:29: tokens: must be a non-neg"),
        ({"attention": ATTENTION + "0,0,1,400,-1\n"}, r"attention.csv:\d+: time_us: must be a"),
        ({"dense": DENSE.replace("o_proj", "qk_norm")}, r"missing rows for o_proj, but every"),
        ({"per_sequence": SEQUENCES.replace("sampler,1,5\n", "")}, r"missing rows for sampler"),
        ({"per_sequence": ""}, r"per_sequence.csv: cannot be read as a table"),
    ],
)
def test_reports_invalid_tables(tmp_path: Path, changed: dict[str, str], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        bundle_profile(bundle(tmp_path, **changed), Sharding(2))


def test_rejects_folders_that_are_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"meta.yaml: cannot be read"):
        bundle_profile(tmp_path, Sharding(2))
    with pytest.raises(InputError, match=r"missing tp2; found tp1"):
        bundle_profile(bundle(tmp_path), Sharding(2, tp=2))
