"""Tests of custom schedulers: trust, settings, and stored code."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

import simkv
from simkv.api import run
from simkv.cli import app
from simkv.conformance.custom_scheduler_check import check_laws
from simkv.core.errors import InputError
from simkv.explain.ledger_kinds import LedgerKind
from simkv.scenario.custom import code_source as sources
from simkv.scenario.custom.code_source import override_trust, set_trust
from simkv.scenario.custom.scheduler_laws import LAWS, LawViolation
from simkv.scenario.scenario_loader import load
from simkv.scenario.scenario_schema import json_schema
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.scheduler import SglangScheduler
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.offload_scheduler import VllmOffloadScheduler
from simkv.study.run_digest import compute_digest
from simkv.study.simulation_job import make_job, run_job
from tests.custom.sample_scheduler import GOOD, RULE, SCENARIO, write

#: Code that records that it was executed.
LOUD = GOOD + "\nopen(__file__ + '.ran', 'w').close()\n"
NOT_TRUSTED = "the scenario would run this code; review it, then pass --trust"


@pytest.fixture(autouse=True)
def nobody_is_trusted() -> None:
    set_trust(False)


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def test_untrusted_scenario_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, LOUD)
    monkeypatch.chdir(tmp_path)
    over = ["--over", "engine.num_blocks=20,30"]
    for words in (
        ["run", path],
        ["explain", path],
        ["report", path],
        ["whatif", path],
        ["bisect", path, *over],
        ["shrink", path, "--keep", "served"],
        ["sweep", path, *over],
    ):
        done = invoke(*words)
        assert isinstance(done.exception, InputError), words
        assert NOT_TRUSTED in str(done.exception), words
        assert str(done.exception).startswith(f"{path}:"), words
    knob = "engine.num_blocks=20..30"
    calls: list[Callable[[], object]] = [
        lambda: run(path),
        lambda: load(path),
        lambda: simkv.plan(path, smallest=knob, objectives=["unserved<=0"]),
        lambda: simkv.sweep(path, {"engine.num_blocks": [20, 30]}),
    ]
    for call in calls:
        with pytest.raises(InputError, match="trust=True"):
            call()
    assert not (tmp_path / "mine.py.ran").exists()
    assert not list(tmp_path.glob("runs/*"))


def test_saved_run_requires_trust(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    out = tmp_path / "out"
    assert invoke("run", path, "--out", out, "--no-plots", "--trust").exit_code == 0
    assert (out / "mine.py").read_bytes() == GOOD.encode()
    for command in ("explain", "report"):
        assert NOT_TRUSTED in str(invoke(command, out).exception)
        quick = ["--no-whatif"] if command == "report" else []
        assert invoke(command, out, "--trust", *quick).exit_code == 0
    set_trust(False)
    again = run(out / "scenario.yaml", trust=True).figures
    assert again.equals(run(path, trust=True).figures)
    with pytest.raises(InputError, match=NOT_TRUSTED):  # trust applies to one call only
        run(path)


def test_digest_covers_code(tmp_path: Path) -> None:
    def digest(code: str) -> str:
        with override_trust(True):
            return compute_digest(load(write(tmp_path, code))["run"], tmp_path)

    assert digest(GOOD) == digest(GOOD)
    assert digest(GOOD) != digest(GOOD + "\n")


def test_worker_runs_code_of_job(tmp_path: Path) -> None:
    with override_trust(True):
        scenario = load(write(tmp_path))["run"]
    sent = pickle.dumps(make_job(scenario, tmp_path))
    (tmp_path / "mine.py").write_text("raise SystemExit('changed')", encoding="utf-8")
    sources.load_scheduler_class.cache_clear()
    job = pickle.loads(sent)
    done = run_job(job)
    assert done.error is None
    assert done.summary is not None
    assert done.summary["finished"] == 12


def test_validates_custom_knobs(tmp_path: Path) -> None:
    path = write(tmp_path)

    def error(**knobs: Any) -> str:
        with pytest.raises(InputError) as caught:
            run(path, trust=True, **{f"engine.{name}": v for name, v in knobs.items()})
        return str(caught.value)

    assert "watermak: unknown field (did you mean 'watermark'?)" in error(watermak=1)
    assert "engine.watermark: should be a number; found 'x'" in error(watermark="x")
    assert "engine.order: unknown value 'last'; expected arrival, shortest" in error(order="last")
    assert "num_blocks: must be at least 1, got 0" in error(num_blocks=0)
    table = simkv.sweep(path, {"engine.watermark": [0.0, 0.5]}, jobs=1, trust=True)
    assert table["preemptions"].tolist()[0] > table["preemptions"].tolist()[1]


def test_schema_accepts_custom_engines(tmp_path: Path) -> None:
    validator = Draft202012Validator(json_schema())
    assert not list(validator.iter_errors(SCENARIO))
    wrong = {**SCENARIO, "engine": {**SCENARIO["engine"], "name": "vllm"}}
    assert list(validator.iter_errors(wrong))


def test_ledger_without_wait_reasons(tmp_path: Path) -> None:
    silent = GOOD.replace("batch.held = Held(", "str((").replace('"slot")', '"slot"))')
    silent = silent.replace('"blocks")', '"blocks"))')
    for code, kind in ((GOOD, LedgerKind.BLOCKS), (silent, LedgerKind.QUEUED)):
        result = run(write(tmp_path, code), trust=True).results["run"]
        assert result.diagnosis.totals.get(kind, 0.0) > 1.0, kind
    assert LedgerKind.BLOCKS not in result.diagnosis.totals


SUBCLASS = '''from {module} import {base}
from {config_module} import {config}

class Mine({base}):
    """The packaged scheduler, unchanged."""

    config: {config}
'''


@pytest.mark.parametrize(
    ("base", "config", "knobs"),
    [
        (VllmOffloadScheduler, VllmConfig, {"num_gpu_blocks": 40, "num_cpu_blocks": 200}),
        (
            SglangScheduler,
            SglangConfig,
            {
                "max_total_num_tokens": 2000,
                "enable_prefill_delayer": True,
                "prefill_delayer_queue_min_ratio": 2.0,
                "prefill_delayer_max_delay_ms": 10,
            },
        ),
    ],
)
def test_subclass_of_packaged_scheduler_decides_as_its_base(
    tmp_path: Path, base: type[Any], config: type[Any], knobs: dict[str, Any]
) -> None:
    code = SUBCLASS.format(
        module=base.__module__,
        base=base.__name__,
        config_module=config.__module__,
        config=config.__name__,
    )
    prompts = {"distribution": "uniform", "low": 16, "high": 200}
    sessions = {
        "num_sessions": 20,
        "turns": 3,
        "request_rate": 0.5,
        "think_time": 9,
        "seed": 1,
        "prompt_tokens": prompts,
        "output_tokens": 30,
    }
    fields: dict[str, Any] = {"workload": {"sessions": sessions}}
    if "num_cpu_blocks" in knobs:
        knobs["max_model_len"] = 600
        fields["offload"] = {"bytes_per_token": 131072, "host_gb_s": 0.05}
    mine = write(tmp_path, code, engine={"name": "mine", "file": "mine.py", **knobs}, **fields)
    own = run(mine, trust=True).figures
    name = get_args(get_type_hints(config)["name"])[0]
    packaged = run({**SCENARIO, **fields, "engine": {"name": name, **knobs}}).figures
    assert own.equals(packaged)


def test_custom_vllm_policy_rejects_kv_offloading_and_transfer(tmp_path: Path) -> None:
    for knobs in ({"num_cpu_blocks": 200}, {"kv_connector": "NixlConnector"}):
        engine = {"name": "mine", "file": "mine.py", "num_gpu_blocks": 200, "max_model_len": 512}
        path = write(tmp_path, RULE.read_text(encoding="utf-8"), engine={**engine, **knobs})
        (knob,) = knobs
        with pytest.raises(InputError, match=f"{knob}: not supported with a custom policy"):
            run(path, trust=True)


def test_fleet_of_custom_schedulers(tmp_path: Path) -> None:
    path = write(tmp_path, fleet={"replicas": 2, "router": {"name": "round_robin"}})
    assert run(path, trust=True).figures.loc["finished", "run"] == 12


def test_installed_scheduler_needs_no_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package_of_mine.py").write_text(GOOD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("packaged", "package_of_mine:Mine", sources.ENTRY_POINT_GROUP)
    monkeypatch.setattr(sources, "_points", lambda: (point,))
    path = write(tmp_path, "", engine={"name": "packaged", "num_blocks": 20, "watermark": 0.1})
    assert run(path).figures.loc["finished", "run"] == 12


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("x = 1\n", "mine.py:1: defines no scheduler"),
        ("def f(:\n", "mine.py:1: cannot run: SyntaxError"),
        ("\n\nraise ValueError('no')\n", "mine.py:3: cannot run: ValueError: no"),
        ("class A:\n    config: int\n    def schedule(self): ...\n", "must be a frozen dataclass"),
    ],
)
def test_rejects_files_without_scheduler(tmp_path: Path, code: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        run(write(tmp_path, code), trust=True)


def test_law_violations_are_documented_and_picklable() -> None:
    broken = LawViolation("blocks", "one is gone", "mine.py", 7, 3)
    assert str(pickle.loads(pickle.dumps(broken))) == (
        "mine.py:7: violates the invariant of blocks at step 3: one is gone (free and held blocks "
        "add up to all blocks, and running requests hold enough)"
    )
    assert all(LAWS.values())


def test_check_detects_hash_order(tmp_path: Path) -> None:
    by_hash = (
        "        self.waiting.sort(key=lambda r: hash(f'{r.id} '))\n"
        "        print('decides', end='')\n        reserve ="
    )
    (tmp_path / "mine.py").write_text(GOOD.replace("        reserve =", by_hash, 1))
    found = check_laws(tmp_path / "mine.py", examples=20)
    assert found.broken is not None
    assert found.broken.law == "chance"
    assert "PYTHONHASHSEED=1 request" in str(found.broken)


def test_check_shrinks_violation(tmp_path: Path) -> None:
    forgetful = (
        "        if len(self.running) > 1:\n            self.running.pop()\n        reserve ="
    )
    (tmp_path / "mine.py").write_text(GOOD.replace("        reserve =", forgetful, 1))
    found = check_laws(tmp_path / "mine.py", examples=60)
    assert found.broken is not None
    assert found.broken.law == "requests"
    assert found.counterexample is not None
    assert len(found.counterexample["workload"]["requests"]) == 2
    shown = tmp_path / "shown.yaml"
    shown.write_text(found.to_yaml(shown), encoding="utf-8")
    done = invoke("check-scheduler", shown, "--trust")
    assert done.exit_code == 1, done.output
    assert f"violates the invariant of requests at step {found.broken.step}" in done.output
    assert NOT_TRUSTED in str(invoke("check-scheduler", shown).exception)


def test_check_of_scenario_covers_custom_schedulers(tmp_path: Path) -> None:
    vllm = {"engine": {"name": "vllm", "num_gpu_blocks": 200, "max_model_len": 512}}
    path = write(tmp_path, variants={"custom": {}, "vllm": vllm})
    done = invoke("check-scheduler", path, "--trust")
    assert (done.exit_code, done.output) == (0, f"{path}, custom: no invariant violated\n")
    path = write(tmp_path, **vllm)
    assert "vllm is not a custom scheduler" in str(invoke("check-scheduler", path).exception)
