"""Tests of the plots of a run, and of the intervals that they show."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.costs.step_load import StepLoad
from simkv.explain.ledger_kinds import LedgerKind
from simkv.explain.wait_ledger import build_ledger, find_pauses, find_wasted_segments
from simkv.metrics.scenario_runner import run_file, run_scenario
from simkv.report.lanes_plot import (
    BARS,
    Bar,
    _pixels,
    _shares,
    build_lane_states,
    build_lanes,
    sample_lanes,
)
from simkv.report.pressure_plot import bin_column
from simkv.report.run_plots import (
    draw_fleet,
    find_slowest_replica,
    latency_points,
    write_plots,
    write_run_plots,
)
from simkv.scenario.scenario import Scenario
from simkv.sim.run_record import (
    EngineHalt,
    Interruptions,
    RequestRecord,
    RunRecord,
)
from simkv.sim.segments import RowSegment, pack_segments
from simkv.sim.step_log import QueueState

WAITING, PREFILL, DECODE, PREEMPTED = "waiting", "prefill", "decode", "preempted"

STARVING = """
name: starving
workload: {burst: {num_prompts: 40, prompt_tokens: 500, output_tokens: 100, interval: 1.0}}
engine: {name: mistralrs, variant: bucketed, block_size: 32, num_gpu_blocks: 1025}
profile: l4-mistralrs-slow-prefill
timeout: 300
variants:
  before: {}
  after: {engine: {variant: pr2034}}
"""
PRESSURE = """
name: pressure
workload: {burst: {num_prompts: 12, prompt_tokens: 100, output_tokens: 60, interval: 3.0}}
engine: {name: mistralrs, variant: pr2031a, block_size: 16, num_gpu_blocks: 24}
profile: unit-step
timeout: 150
variants:
  mistralrs: {}
  dies: {engine: {variant: pr2034}}
  cut-off: {horizon: 70.5}
  nobody-waits: {timeout: 2.5}
  vllm: {engine: {name: vllm, num_gpu_blocks: 24, max_model_len: 200, max_num_seqs: 8,
                  max_num_batched_tokens: 64}}
  sglang: {engine: {name: sglang, max_total_num_tokens: 400, chunked_prefill_size: 64}}
  fastdeploy: {engine: {name: fastdeploy, num_blocks: 24, block_size: 16, reserve_init: 1}}
"""


def run(folder: Path, text: str) -> dict[str, RunRecord]:
    path = folder / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return {name: result.record for name, result in run_file(path).items()}


@pytest.fixture(scope="module")
def starving(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    return run(tmp_path_factory.mktemp("starving"), STARVING)


@pytest.fixture(scope="module")
def pressure(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    return run(tmp_path_factory.mktemp("pressure"), PRESSURE)


def log_of(steps: Iterable[tuple[float, float]], end: float = 100.0) -> RunRecord:
    """Return a record with these steps (start, end) and no requests."""
    record = RunRecord(num_blocks=10)
    for start, stop in steps:
        load = StepLoad(0, 0, 0, 0, 0)
        record.steps.append((start, start, stop), "decode", load, 0, QueueState(0, 0, 0))
    record.end = end
    return record


def life_of(
    *segments: tuple[str, int, int],
    arrival: float = 0.0,
    ended_at: float | None = None,
    preempted: tuple[float, int] | None = None,
    outcome: Outcome = Outcome.FINISHED,
    i: int = 0,
) -> RequestRecord:
    request = Request(id=i, prompt_tokens=1, max_tokens=9, arrival=arrival, output_tokens=9)
    life = RequestRecord(request, outcome, ended_at=ended_at)
    if preempted:
        life.interruptions = Interruptions([preempted[0]], [preempted[1]])
    life.segment_data = pack_segments(
        RowSegment(kind, first, last, True) for kind, first, last in segments
    )
    return life


def seconds(count: int) -> RunRecord:
    """Return a record of ``count`` steps of one second each, from 0 s."""
    return log_of((float(i), i + 1.0) for i in range(count))


def lane_of(record: RunRecord, life: RequestRecord) -> list[Bar]:
    record.requests[life.request.id] = life
    return build_lane_states(build_ledger(record)[life.request.id])


def drawn(record: RunRecord, life: RequestRecord) -> list[Bar]:
    record.requests[life.request.id] = life
    return build_lanes(record, [life])[0]


def test_lane_has_waiting_prefill_and_decode() -> None:
    life = life_of(("prefill", 2, 3), ("decode", 4, 8), arrival=0.5, ended_at=9.0)
    assert lane_of(seconds(9), life) == [
        (WAITING, 0.5, 2.0),
        (PREFILL, 2.0, 4.0),
        (DECODE, 4.0, 9.0),
    ]


def test_gap_is_waiting_unless_kv_was_lost() -> None:
    segments = ("prefill", 0, 0), ("decode", 1, 1), ("prefill", 5, 5)
    kept = life_of(*segments, ended_at=6.0)
    assert [bar.kind for bar in lane_of(seconds(6), kept)] == [
        PREFILL,
        DECODE,
        WAITING,
        PREFILL,
    ]
    lost = life_of(*segments, ended_at=6.0, preempted=(3.0, 3))
    assert lane_of(seconds(6), lost)[2:] == [
        (WAITING, 2.0, 3.0),
        (PREEMPTED, 3.0, 5.0),
        (PREFILL, 5.0, 6.0),
    ]


@pytest.mark.parametrize("at", [1.0, 1.5, 2.0])
def test_pipelined_scheduler_preempts_during_a_step(at: float) -> None:
    life = life_of(("decode", 0, 1), ("prefill", 4, 4), ended_at=5.0, preempted=(at, 2))
    assert lane_of(seconds(5), life)[1] == (PREEMPTED, 2.0, 4.0)


def test_preemption_with_immediate_prefill_does_not_color_the_next_gap() -> None:
    segments = ("decode", 0, 0), ("prefill", 1, 1), ("decode", 4, 4)
    life = life_of(*segments, ended_at=5.0, preempted=(1.0, 1))
    assert [bar.kind for bar in lane_of(seconds(5), life)] == [
        DECODE,
        PREFILL,
        WAITING,
        DECODE,
    ]


def test_request_preempted_until_the_end() -> None:
    life = life_of(("decode", 0, 1), ended_at=30.0, preempted=(2.0, 2))
    assert lane_of(seconds(9), life) == [(DECODE, 0.0, 2.0), (PREEMPTED, 2.0, 30.0)]


def test_engine_pause_inside_a_segment_is_waiting() -> None:
    record = log_of([(0.0, 1.0), (1.0, 2.0), (7.0, 8.0), (8.0, 9.0)])
    assert find_pauses(record) == [1]
    assert lane_of(record, life_of(("decode", 0, 3), ended_at=9.0)) == [
        (DECODE, 0.0, 2.0),
        (WAITING, 2.0, 7.0),
        (DECODE, 7.0, 9.0),
    ]


def test_rounding_leaves_no_tiny_intervals() -> None:
    record = log_of([(0.1 + 0.2, 1.0), (1.0 + 4e-16, 2.0), (2.0 - 4e-16, 3.0)])
    life = life_of(("prefill", 0, 0), ("decode", 1, 2), arrival=0.3, ended_at=3.0 + 9e-16)
    assert lane_of(record, life) == [(PREFILL, 0.3, 1.0), (DECODE, 1.0, 3.0 + 9e-16)]


def test_client_leaves_during_a_step() -> None:
    life = life_of(
        ("prefill", 0, 0), ("decode", 1, 1), ("decode", 4, 4), ended_at=1.25, preempted=(2.0, 2)
    )
    assert lane_of(seconds(9), life) == [(PREFILL, 0.0, 1.0), (DECODE, 1.0, 1.25)]
    assert find_wasted_segments(seconds(9), life) == [
        (LedgerKind.DECODE, 1.25, 2.0),
        (LedgerKind.DECODE, 4.0, 5.0),
    ]


def test_request_that_was_never_served() -> None:
    assert lane_of(seconds(9), life_of(arrival=2.0, ended_at=7.0)) == [(WAITING, 2.0, 7.0)]


def test_request_after_the_end_of_the_run() -> None:
    assert lane_of(seconds(9), life_of(arrival=120.0, ended_at=100.0)) == []


def assert_tiles(life: RequestRecord, tiles: list[Bar]) -> None:
    assert life.ended_at is not None
    if life.ended_at <= life.request.arrival:
        assert tiles == []
        return
    assert tiles[0].start == life.request.arrival
    assert tiles[-1].end == life.ended_at
    assert all(tile.start < tile.end for tile in tiles)
    assert all(a.end == b.start and a.kind != b.kind for a, b in pairwise(tiles))


def test_lanes_cover_every_request_of_every_engine(pressure: dict[str, RunRecord]) -> None:
    seen = set()
    for record in pressure.values():
        for life in record.requests.values():
            tiles = lane_of(record, life)
            assert_tiles(life, tiles)
            seen |= {tile.kind for tile in tiles}
            served = dict.fromkeys((WAITING, PREFILL, DECODE, PREEMPTED), 0.0)
            for kind, start, end in [
                *tiles,
                *build_lane_states(find_wasted_segments(record, life)),
            ]:
                served[kind] += end - start
            for kind in (PREFILL, DECODE):
                steps = sum(
                    min(record.steps.end[row], record.end) - record.steps.start[row]
                    for segment in life.segments
                    if segment.kind == kind
                    for row in range(segment.first, segment.last + 1)
                )
                assert served[kind] == pytest.approx(steps, abs=1e-5)
            lost = [tile for tile in tiles if tile.kind == PREEMPTED]
            assert len(lost) <= len(life.preempted_at)
    assert seen == {WAITING, PREFILL, DECODE, PREEMPTED}


def test_lanes_show_starved_requests_and_wasted_work(starving: dict[str, RunRecord]) -> None:
    before, after = starving.values()
    starved = [life for life in before.requests.values() if life.outcome is Outcome.STARVED]
    assert len(starved) == 24
    shown = dict(
        zip(before.requests, build_lanes(before, list(before.requests.values())), strict=True)
    )
    for life in before.requests.values():
        kinds = {bar.kind for bar in shown[life.request.id]}
        assert ("starved" in kinds) == (life in starved)
        assert kinds <= set(BARS)
    for life in starved:
        lane = shown[life.request.id]
        assert life.deadline is not None
        for bar in lane:
            assert (bar.kind in ("gone", "wasted")) == (bar.start >= life.deadline)
        assert all(a.end == b.start for a, b in pairwise(lane))
        assert lane[-1].kind == "wasted"
    assert {
        bar.kind for lane in build_lanes(after, list(after.requests.values())) for bar in lane
    } == {
        "waiting",
        "prefill",
        "decode",
    }


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Outcome.STARVED, "starved"),
        (Outcome.STALLED, "failed"),
        (Outcome.LOST, "failed"),
        (Outcome.REJECTED, "failed"),
        (Outcome.CUT_OFF, "waiting"),
        (Outcome.FINISHED, "waiting"),
    ],
)
def test_waiting_of_failed_requests_has_its_own_color(outcome: Outcome, kind: str) -> None:
    life = life_of(("prefill", 3, 3), ended_at=4.0, outcome=outcome)
    assert [bar.kind for bar in drawn(seconds(5), life)] == [kind, "prefill"]


def test_pixels_are_shared_by_kind() -> None:
    record = log_of((0.01 * i, 0.01 * (i + 1)) for i in range(10_000))
    rows = np.random.default_rng(1).permutation(10_000)[:2_500]
    life = life_of(*(("decode", int(row), int(row)) for row in sorted(rows)), ended_at=100.0)
    shares = _shares(drawn(record, life), np.linspace(0.0, 200.0, 401))
    assert shares.sum() == pytest.approx(200.0)
    painted = _pixels(shares[None])[0]
    assert (painted[200:] == -1).all()
    decode = list(BARS).index("decode")
    assert (painted == decode).sum() == pytest.approx(50, abs=2)
    assert all(shares[kind, place] > 0.0 for place, kind in enumerate(painted[:200]))


def test_sample_keeps_all_of_few_failures() -> None:
    lives = [
        life_of(i=i, ended_at=9.0, outcome=Outcome.LOST if i % 300 == 7 else Outcome.FINISHED)
        for i in range(1_000)
    ]
    chosen = [life.request.id for life in sample_lanes(lives, 50)]
    assert len(chosen) == 50
    assert chosen == sorted(chosen)
    assert {7, 307, 607, 907} < set(chosen)
    assert sample_lanes(lives[:50], 50) == lives[:50]


def test_sample_has_many_failures_in_proportion() -> None:
    lives = [
        life_of(i=i, ended_at=9.0, outcome=Outcome.FINISHED if i % 10 == 0 else Outcome.STARVED)
        for i in range(1_000)
    ]
    assert sum(life.outcome is Outcome.STARVED for life in sample_lanes(lives, 100)) == 90


def test_latency_plot_includes_all_requests(pressure: dict[str, RunRecord]) -> None:
    for record in pressure.values():
        found = latency_points(record)
        assert [point.place for point in found] == list(range(12))
        for point, life in zip(found, record.requests.values(), strict=True):
            assert point.outcome is life.outcome
            assert life.ended_at is not None
            waited = life.ended_at - life.request.arrival
            assert point.last == pytest.approx(max(waited, 0.0), abs=1e-5)


def test_bins_a_column_over_time() -> None:
    record = log_of([(0.0, 1.0), (1.0, 3.0), (8.0, 9.0)])
    least, mean, most = bin_column(record, [4, 2, 6], np.linspace(0.0, 12.0, 7))
    assert least[:2].tolist() == [2.0, 2.0]
    assert mean[:2].tolist() == [3.0, 2.0]
    assert most[:2].tolist() == [4.0, 2.0]
    assert np.isnan(mean).tolist() == [False, False, True, True, False, True]
    assert (least[4], mean[4], most[4]) == (6.0, 6.0, 6.0)


def test_plots_do_not_depend_on_user_settings(
    starving: dict[str, RunRecord], tmp_path: Path
) -> None:
    runs = {"before": starving["before"]}
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    names = ["lanes.png", "latency.png", "pressure.png"]
    assert write_plots(runs, "starving", first) == [first / name for name in names]
    with matplotlib.rc_context({"font.size": 31, "savefig.dpi": 20, "axes.facecolor": "red"}):
        write_plots(runs, "starving", second)
        assert matplotlib.rcParams["font.size"] == 31
    for name in names:
        data = (first / name).read_bytes()
        assert data == (second / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert not any(chunk in data for chunk in (b"tEXt", b"iTXt", b"tIME"))


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_draws_empty_and_unusual_runs(tmp_path: Path) -> None:
    empty = RunRecord(num_blocks=0)
    dead = log_of([], end=5.0)
    dead.engine_halt = EngineHalt("engine died", 0.0, "why", [0])
    dead.requests[0] = life_of(ended_at=5.0, outcome=Outcome.STALLED)
    many = seconds(3)
    for i in range(300):
        many.requests[i] = life_of(i=i, ended_at=3.0, outcome=list(Outcome)[i % 6])
    for column in (many.steps.waiting, many.steps.running, many.steps.free_blocks):
        column[:] = array(column.typecode, [1, 2, 3])
    name = "a-very-long-name-of-a-variant-" * 3
    write_plots({name: empty, "$x_": dead, "many": many}, "odd $title_ " * 20, tmp_path)


def test_draws_quick_plots_and_names_the_others(tmp_path: Path) -> None:
    one = Scenario.model_validate(
        {
            "name": "x",
            "workload": {"burst": {"num_prompts": 4, "prompt_tokens": 9, "output_tokens": 5}},
            "engine": {"name": "mistralrs", "variant": "pr2034"},
            "profile": "unit-step",
        }
    )
    result = run_scenario(one, tmp_path)
    few, many = {"a": result}, {f"v{n}": result for n in range(12)}
    assert write_run_plots(few, "few", tmp_path, everything=False) == []
    assert len(list(tmp_path.glob("*.png"))) == 3
    other = tmp_path / "other"
    other.mkdir()
    left_out = write_run_plots(many, "many", other, everything=False)
    assert left_out == ["latency.png", "pressure.png"]
    assert [path.name for path in other.iterdir()] == ["lanes.png"]
    assert write_run_plots(many, "many", other, everything=True) == []


def test_fleet_plot_shows_the_slowest_replica(tmp_path: Path) -> None:
    scenario = Scenario.model_validate(
        {
            "name": "x",
            "workload": {
                "requests": [
                    {"prompt_tokens": 9, "output_tokens": 5 + 40 * (i % 3 == 1)} for i in range(9)
                ]
            },
            "engine": {"name": "mistralrs", "variant": "pr2034"},
            "profile": "unit-step",
            "fleet": {"replicas": 3},
        }
    )
    result = run_scenario(scenario, tmp_path)
    assert find_slowest_replica(result.parts) == "replica 1"
    assert write_run_plots({"run": result}, "x", tmp_path, everything=True) == []
    assert {p.name for p in tmp_path.iterdir()} == {
        "fleet.png",
        "lanes.png",
        "latency.png",
        "pressure.png",
    }
    figure = draw_fleet({"run": result.parts, "again": result.parts}, "x")
    first, second, _ = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == list(result.parts)
    load = np.asarray(first.images[0].get_array())
    assert load.shape[0] == 3
    assert np.nanmax(load) == 3.0  # three requests per replica
    assert np.isnan(load[0, -1])  # this replica finished before the slowest replica
    assert second.get_title(loc="left") == "again"
