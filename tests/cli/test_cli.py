"""Tests of the command line: output, files and exit codes."""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from ruamel.yaml import YAML

from simkv import __version__
from simkv.cli import main
from simkv.core.version import is_compiled
from simkv.schedulers.engine_registry import ENGINES
from tests.conformance.recordings import FILES as PACKED
from tests.conformance.recordings import Committed, committed
from tests.conftest import ROOT
from tests.scenario.test_scenario import BROKEN, PLAIN, mutate

SCENARIOS = ["mistralrs-six", "mistralrs-forty", "mistralrs-forty-pressure"]
OUTCOMES = ["finished", "starved", "timed_out", "rejected", "lost", "stalled", "cut_off"]
FIGURES = [
    "requests",
    *OUTCOMES,
    "verdict",
    "makespan_s",
    "output_throughput",
    "request_throughput",
    "preemptions",
    "recomputed_tokens",
    "longest_stall_s",
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
    "e2e_ms",
    "steps",
]
COLUMNS = (
    "variant,id,arrival_s,prompt_tokens,output_tokens,outcome,first_token_s,finish_s,ttft_s,"
    "tpot_s,e2e_s,preemptions,recomputed_tokens"
)


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Simkv:
    """The command line, run in a separate process and directory."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: object) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["simkv", *map(str, arguments)])
        self._capsys.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        return Ran(code, *self._capsys.readouterr())

    def write(self, text: str | bytes, name: str = "s.yaml") -> str:
        path = self.folder / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return name

    def written(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}


@pytest.fixture
def simkv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Simkv:
    return Simkv(tmp_path, monkeypatch, capsys)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# Runs


@pytest.mark.parametrize("name", SCENARIOS)
def test_runs_a_packaged_scenario(simkv: Simkv, name: str) -> None:
    ran = simkv("run", ROOT / "scenarios" / f"{name}.yaml", "--no-plots", "--steps", "--full")
    assert (ran.code, ran.err) == (0, "")
    folder = simkv.folder / "runs" / name
    assert ran.out.rstrip().endswith(
        f"Written to runs/{name}: requests.csv, scenario.yaml, steps.csv, summary.json"
    )

    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["scenario"], summary["version"]) == (name, __version__)
    for variant, figures in summary["variants"].items():
        assert f"Variant:                                {variant}\n" in ran.out
        assert set(FIGURES) <= figures.keys()
        for latency in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert list(figures[latency]) == ["mean", "median", "p90", "p95", "p99"]
        assert sum(figures[outcome] for outcome in OUTCOMES) == figures["requests"]

    assert (folder / "requests.csv").read_text().splitlines()[0] == COLUMNS
    by_variant: dict[str, list[dict[str, str]]] = {}
    for row in rows(folder / "requests.csv"):
        by_variant.setdefault(row["variant"], []).append(row)
    assert list(by_variant) == list(summary["variants"])
    for variant, requests in by_variant.items():
        figures = summary["variants"][variant]
        assert [row["id"] for row in requests] == [str(i) for i in range(figures["requests"])]
        for outcome in OUTCOMES:
            found = sum(row["outcome"] == outcome for row in requests)
            assert found == figures[outcome]
        assert sum(int(row["preemptions"]) for row in requests) == figures["preemptions"]

    steps = rows(folder / "steps.csv")
    for variant, figures in summary["variants"].items():
        assert sum(row["variant"] == variant for row in steps) == figures["steps"]
    again = YAML(typ="safe").load(folder / "scenario.yaml")
    assert list(again["variants"]) == list(summary["variants"])


def test_writes_plots(simkv: Simkv) -> None:
    six = ROOT / "scenarios" / "mistralrs-six.yaml"
    assert simkv("run", six, "--out", "o", "--plots").code == 0
    for name in ("lanes", "latency", "pressure"):
        picture = (simkv.folder / "o" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000


def test_compares_with_published_figures(simkv: Simkv) -> None:
    out = simkv("run", ROOT / "scenarios" / "mistralrs-forty.yaml", "--no-plots", "--full").out
    table = out[out.index("Published and simulated figures") :]
    makespan = next(line for line in table.splitlines() if "makespan_s" in line)
    assert makespan.split()[0] == "after"
    assert "195.68" in makespan
    assert makespan.rstrip().endswith("%")
    for title in ("Given", "Fitted", "Assumed", "Costs"):
        assert f"\n{title}\n" in out


def test_set_overrides_a_field_and_is_recorded_in_results(simkv: Simkv) -> None:
    simkv.write(PLAIN)
    ran = simkv("run", "s.yaml", "--no-plots", "--set", "engine.variant=seed", "--set", "name=x")
    assert ran.code == 0
    assert (
        YAML(typ="safe").load(simkv.folder / "runs/x/scenario.yaml")["engine"]["variant"] == "seed"
    )


def test_second_run_replaces_the_first(simkv: Simkv) -> None:
    simkv.write(PLAIN)
    assert simkv("run", "s.yaml", "--no-plots", "--out", "o", "--steps").code == 0
    assert simkv("run", "s.yaml", "--no-plots", "--out", "o").code == 0
    assert simkv.written() == {
        "s.yaml",
        "o",
        "o/summary.json",
        "o/requests.csv",
        "o/scenario.yaml",
    }


def test_resolved_scenario_gives_the_same_result(simkv: Simkv) -> None:
    path = ROOT / "scenarios" / "mistralrs-forty-pressure.yaml"
    simkv("run", path, "--no-plots", "--out", "a", "--set", "engine.block_size=16")
    assert simkv("run", "a/scenario.yaml", "--no-plots", "--out", "b").code in (0, 1)
    for name in ("requests.csv", "scenario.yaml", "summary.json"):
        assert (simkv.folder / "a" / name).read_bytes() == (simkv.folder / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("extra", "code", "outcome"),
    [
        ("", 0, "finished"),
        ("timeout: 2.5\n", 3, "timed_out"),
        ("horizon: 2.5\n", 0, "cut_off"),
    ],
)
def test_exit_code_depends_on_unserved_requests(
    simkv: Simkv, extra: str, code: int, outcome: str
) -> None:
    simkv.write(PLAIN + extra)
    assert simkv("run", "s.yaml", "--no-plots").code == code
    assert {row["outcome"] for row in rows(simkv.folder / "runs/t/requests.csv")} == {outcome}
    assert simkv("run", "s.yaml", "--no-plots", "--exit-zero").code == 0


def test_notes_requests_larger_than_the_cache(simkv: Simkv) -> None:
    text = PLAIN.replace("prompt_tokens: 5", "prompt_tokens: 500")
    simkv.write(text.replace("variant: bucketed", "variant: bucketed\n  num_gpu_blocks: 9"))
    ran = simkv("run", "s.yaml", "--no-plots")
    assert ran.code == 3
    assert (
        "Note: 4 requests do not fit into the KV cache: request 3 needs 16 blocks of 32 tokens"
        in ran.out
    )
    assert "the cache has 8" in ran.out


# Bad input: exit code 2, one line per problem with its place, no traceback, and no written file


def refused(simkv: Simkv, *arguments: object) -> list[str]:
    before = simkv.written()
    ran = simkv(*arguments)
    assert ran.code == 2, ran
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert simkv.written() == before
    lines = ran.err.splitlines()
    assert lines
    return lines


@pytest.mark.parametrize(("text", "complaint"), BROKEN[::4], ids=lambda x: x[-40:])
def test_rejects_invalid_scenarios(simkv: Simkv, text: str, complaint: str) -> None:
    simkv.write(text)
    lines = refused(simkv, "run", "s.yaml")
    assert lines[0].startswith(f"simkv: {complaint}")
    assert all(line.startswith("simkv: s.yaml:") for line in lines)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "s.yaml:1: must be a mapping of fields, got nothing"),
        ("- 1\n", "s.yaml:1: must be a mapping of fields, got a list"),
        ("a: [1\n", "s.yaml:2: not valid YAML"),
        (bytes(range(256)), "s.yaml: not UTF-8 text"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{x}: &{x} [{','.join([f'*{y}'] * 10)}]\n"
                for y, x in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "s.yaml:7: aliases expand to more than 2,000,000 values",
        ),
    ],
)
def test_rejects_files_that_are_not_scenarios(
    simkv: Simkv, text: str | bytes, complaint: str
) -> None:
    simkv.write(text)
    assert refused(simkv, "run", "s.yaml") == [
        line for line in refused(simkv, "run", "s.yaml") if line.startswith(f"simkv: {complaint}")
    ]


@pytest.mark.parametrize("command", [("run",), ("report",)])
def test_rejects_missing_scenarios(simkv: Simkv, command: tuple[str, ...]) -> None:
    assert len(refused(simkv, *command, "nothing.yaml")) == 1
    (simkv.folder / "folder").mkdir()
    assert len(refused(simkv, *command, "folder")) == 1


@pytest.mark.parametrize(
    "assignment",
    [
        "engine.blok_size=5",
        "engine.block_size=",
        "engine.block_size=0",
        "x",
        "=",
        "name.x=1",
        "a=[",
    ],
)
def test_rejects_invalid_overrides(simkv: Simkv, assignment: str) -> None:
    simkv.write(PLAIN)
    (line,) = refused(simkv, "run", "s.yaml", "--set", assignment)
    assert line.startswith(f"simkv: --set {assignment}: ")


def test_rejects_output_directories_with_other_files(simkv: Simkv) -> None:
    simkv.write(PLAIN)
    (simkv.folder / "thesis").mkdir()
    simkv.write("years of work", "thesis/thesis.tex")
    simkv.write("", "file")
    for out in ("thesis", "file", "file/below", "."):
        (line,) = refused(simkv, "run", "s.yaml", "--out", out)
        assert line.startswith(f"simkv: --out {out}: ")
    assert (simkv.folder / "thesis" / "thesis.tex").read_text() == "years of work"


WRONG_CALLS = {
    ("nonsense",): "nonsense: there is no such command; simkv --help lists them",
    ("foo",): "foo: there is no such command; simkv --help lists them",
    ("polices",): "polices: there is no such command (did you mean 'policies'?); simkv --help",
    ("trace", "inspct"): "inspct: there is no such command (did you mean 'inspect'?); simkv trace",
    ("run",): "expected a scenario, or options that describe one: --gpu and --model",
    ("run", "a", "b"): "run: got unexpected extra argument(s) (b); see simkv run --help",
    ("run", "--x"): "run --x: there is no such option; simkv run --help lists them",
    ("run", "a", "--junt", "f"): "run --junt: there is no such option (did you mean '--junit'?)",
    (
        "blocks",
        "--tp",
        "x",
    ): "blocks: invalid value for '--tp': should be a whole number; see simkv",
    ("blocks", "--tp", "0"): "blocks: invalid value for '--tp': should be greater than or equal",
    ("sweep", "a", "--executor", "x"): "sweep: invalid value for '--executor': 'x' is not one of",
    ("explain", "mistralrs-six", "99"): "request 99: there is no such request; expected an id",
    ("explain", "mistralrs-six", "x"): "explain: invalid value for '",
    ("sweep", "mistralrs-six", "--over", "engine.num_gpu_blocks=-5"): (
        "--over engine.num_gpu_blocks=-5: engine.num_gpu_blocks"
    ),
    ("plan", "mistralrs-six", "--smallest", "engine.x=1..3", "--slo", "starved<=0"): (
        "--smallest engine.x=1: engine.x"
    ),
}


@pytest.mark.parametrize(("arguments", "line"), WRONG_CALLS.items(), ids=str)
def test_usage_errors_are_one_line(simkv: Simkv, arguments: tuple[str, ...], line: str) -> None:
    ran = simkv(*arguments)
    found = ran.err.splitlines()
    assert (ran.code, ran.out) == (2, "")
    assert found[0].startswith(f"simkv: {line}")
    if arguments[0] not in ("sweep", "plan"):  # these recordings report on each variant
        assert len(found) == 1
    words = ("Value error", "Input should", "instance", "dictionary", "╭", "Usage", "unable to")
    assert not any(word in ran.err for word in words)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_scenarios_run_or_are_rejected(simkv: Simkv, seed: int) -> None:
    rng = random.Random(seed)
    plain = YAML(typ="safe", pure=True).load(PLAIN)
    for _ in range(10):
        tree = mutate(plain, rng)
        simkv.write(json.dumps(tree))
        out = f"o{rng.random()}"
        ran = simkv("run", "s.yaml", "--no-plots", "--out", out)
        assert ran.code in (0, 2, 3), tree
        assert (simkv.folder / out).exists() == (ran.code != 2)
        assert all(line.startswith("simkv: ") for line in ran.err.splitlines())


# Interrupted


@pytest.mark.parametrize(
    "where", ["simkv.metrics.scenario_runner.run_scenario", "simkv.report.run_plots.write_plots"]
)
def test_interrupt_leaves_no_partial_files(
    simkv: Simkv, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupted(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    simkv.write(PLAIN)
    monkeypatch.setattr(where, interrupted)
    ran = simkv("run", "s.yaml", "--out", "o")
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.strip() == "simkv: interrupted; nothing was written"
    assert simkv.written() == {"s.yaml"}


@pytest.mark.parametrize(
    "command",
    [("sweep", "--over"), ("plan", "--slo", "unserved<=0", "--smallest")],
    ids=lambda words: words[0],
)
def test_interrupted_search_reports_stored_runs(
    simkv: Simkv, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def interrupted(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    simkv.write(PLAIN)
    monkeypatch.setattr("simkv.study.job_runner.open_executor", interrupted)
    words = (command[0], "s.yaml", *command[1:], "engine.num_gpu_blocks=20,30", "--out", "o")
    ran = simkv(*words)
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.strip() == "simkv: interrupted; nothing was written"
    store = Path("o/points.jsonl")
    store.parent.mkdir(exist_ok=True)
    store.touch()
    ran = simkv(*words)
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.strip() == (
        "simkv: interrupted; finished runs are stored in o/points.jsonl; repeat the command to "
        "resume"
    )


def test_kinds_of_another_engine_are_refused_before_the_simulation(
    simkv: Simkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulated(*arguments: Any, **more: Any) -> None:
        raise AssertionError("simulated before the check")

    simkv.write(PLAIN)
    monkeypatch.setattr("simkv.metrics.scenario_runner.run_scenario", simulated)
    ran = simkv("run", "s.yaml", "--emit", "bench,vllm-log", "--out", "o")
    assert (ran.code, ran.out) == (2, "")
    assert "--emit vllm-log: the engine of variant run is mistralrs" in ran.err


# Traces


PACKED_FILE = next(path for path in PACKED if path.name == "ratio.jsonl.gz")


def write_single(simkv: Simkv, *cases: str) -> list[Path]:
    """Write recordings of 0.27.0 to one file each."""
    found = {recording.case: recording for recording in committed("vllm", "0.27.0")}
    return [found[case].write(simkv.folder / f"{case}.jsonl") for case in cases]


def test_conform_reports_each_recording_of_files_and_directories(simkv: Simkv) -> None:
    single = write_single(simkv, "gone-200", "gone-204")
    cases = [recording.case for recording in committed("fastdeploy", "ratio")]
    ran = simkv("conform", PACKED_FILE, single[0], simkv.folder)
    assert ran.code == 0
    *lines, last = ran.out.splitlines()
    names = [f"{PACKED_FILE}: {case}" for case in cases] + [str(single[0]), *map(str, single)]
    for name, line in zip(names, lines, strict=True):
        assert line.startswith(f"{name}: ok (")
    assert last == f"{len(names)} of {len(names)} recordings equal"
    assert simkv("conform", "--quiet", simkv.folder).out == "2 of 2 recordings equal\n"


def test_conform_names_the_recording_inside_a_packed_file(simkv: Simkv) -> None:
    rows = [recording.lines() for recording in committed("fastdeploy", "ratio")[:3]]
    rows[1][1]["free_blocks"] = -7
    rows[2][0]["variant"] = "rato"
    simkv.write("\n".join(json.dumps(line) for lines in rows for line in lines), "t.jsonl")
    ran = simkv("conform", "t.jsonl")
    _, second, third = (lines[0]["case"] for lines in rows)
    assert ran.code == 2
    assert f"t.jsonl: {second}: differs at step 0 (fastdeploy ratio)" in ran.out
    line = len(rows[0]) + len(rows[1]) + 1
    assert ran.err.startswith(f"simkv: t.jsonl:{line}: {third}: variant: unknown variant 'rato'")
    assert ran.out.endswith("1 of 3 recordings equal\n")


def test_conform_rejects_a_directory_without_recordings(simkv: Simkv) -> None:
    (simkv.folder / "none").mkdir()
    ran = simkv("conform", "none")
    assert (ran.code, ran.out) == (2, "0 of 1 recordings equal\n")
    assert ran.err == "simkv: none: no recordings (*.jsonl, *.jsonl.gz) in this directory\n"


def test_conform_shows_both_sides_of_the_first_step_that_differs(simkv: Simkv) -> None:
    source = committed("mistralrs", "bucketed")[0]
    true = source.lines()[3]["free_blocks"]
    source.write(simkv.folder / "t.jsonl", lambda lines: lines[3].update(free_blocks=-7))
    ran = simkv("conform", *write_single(simkv, "gone-200"), "t.jsonl")
    assert ran.code == 1
    assert "t.jsonl: differs at step 2 (mistralrs bucketed)\n  free_blocks\n" in ran.out
    assert f"    recorded:  -7\n    simulated: {true}\n" in ran.out
    assert ran.out.endswith("1 of 2 recordings equal\n")


def write_variant(simkv: Simkv, source: Committed, variant: str, config: str | None = None) -> None:
    """Write a recording to ``t.jsonl`` with another variant in its header."""

    def rename(lines: list[Any]) -> None:
        lines[0]["variant"] = variant
        lines[0]["config"]["variant"] = config or variant

    source.write(simkv.folder / "t.jsonl", rename)


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("0.27", ""),
        ("0.27.1", ""),
        ("0.27.9", "; vLLM 0.27.9 was not recorded; simulated with the rules of 0.27.0"),
    ],
)
def test_conform_accepts_all_names_of_a_release(simkv: Simkv, variant: str, said: str) -> None:
    found = committed("vllm", "0.27.0")
    write_variant(simkv, next(r for r in found if r.case == "gone-200"), variant)
    ran = simkv("conform", "t.jsonl")
    assert ran.out == f"t.jsonl: ok (vllm {variant}, 29 steps){said}\n1 of 1 recordings equal\n"


@pytest.mark.parametrize(
    ("engine", "variant", "config", "complaint"),
    [
        (
            "vllm/0.27.0",
            "0.99",
            None,
            "unknown version '0.99'; expected a release of vLLM from 0.9",
        ),
        ("vllm/0.27.0", "0.28.0", "0.27.0", "'0.28.0' differs from '0.27.0' in config"),
        ("sglang/0.5.22", "0.5.21", None, "unknown version '0.5.21'; expected one of 0.5.23, "),
        ("mistralrs/seed", "sead", None, "unknown variant 'sead'; expected one of seed, "),
    ],
)
def test_conform_rejects_unknown_variants(
    simkv: Simkv, engine: str, variant: str, config: str | None, complaint: str
) -> None:
    write_variant(simkv, committed(*engine.split("/"))[0], variant, config)
    ran = simkv("conform", "t.jsonl")
    assert ran.code == 2
    assert ran.err.startswith(f"simkv: t.jsonl:1: variant: {complaint}")


def test_conform_continues_after_an_invalid_file_and_exits_2(simkv: Simkv) -> None:
    simkv.write("{", "bad.jsonl")
    ran = simkv("conform", "bad.jsonl", "nothing.jsonl", *write_single(simkv, "gone-200"))
    assert ran.code == 2
    assert ran.err.splitlines()[0].startswith("simkv: bad.jsonl:1: not JSON")
    assert ran.err.splitlines()[1].startswith("simkv: nothing.jsonl: cannot be read")
    assert ran.out.endswith("1 of 3 recordings equal\n")


# The rest


def test_schema_is_a_json_schema(simkv: Simkv) -> None:
    ran = simkv("schema")
    assert ran.code == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(ran.out))


def test_policies_lists_every_variant_with_its_source(simkv: Simkv) -> None:
    out = simkv("policies").out
    for engine in ENGINES.values():
        for name, variant in engine.variants.items():
            assert name in out
            assert variant.source.split(" ")[0] in out


def test_prints_the_version(simkv: Simkv) -> None:
    which = "compiled" if is_compiled() else "pure Python"
    assert simkv("--version") == (0, f"simkv {__version__} ({which})\n", "")


def test_every_command_has_help(simkv: Simkv) -> None:
    out = simkv("--help").out
    for command in ("run", "conform", "schema", "policies"):
        assert command in out
        assert simkv(command, "--help").code == 0
