"""Tests that launch lines give the effective settings of the release's own code, or of a public
log.

``launch_lines.csv`` has one launch line per row. It contains the expected settings, their source (a
place in the wheel of the release, or a log), and the number of KV blocks if a public log states
this number.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.core.server_options import parse_option_value
from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
from simkv.scenario.launch_defaults import resolve_defaults
from simkv.scenario.launch_line import read_launch_line
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_builder import build_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.scenario_options import ScenarioOptions
from simkv.schedulers.engine_registry import ENGINES, find_engine_spec
from simkv.schedulers.vllm.config import VllmConfig

ROWS = list(
    csv.DictReader(
        Path(__file__).with_name("launch_lines.csv").open(),
        delimiter="|",
        quoting=csv.QUOTE_NONE,
    )
)
#: Largest relative difference between the computed number of KV blocks and the number in a log.
BLOCKS_WITHIN = 0.02


def scenario_of(command: str, gpu: str = "H100", version: str | None = None) -> Scenario:
    options = ScenarioOptions(
        gpu=gpu, version=version, from_command=command, request_rate=1.0, num_prompts=1
    )
    return resolve_variants(build_scenario(options).document)["run"]


def test_the_rows_cover_releases_gpus_and_models() -> None:
    assert len(ROWS) >= 30
    assert {row["gpu"] for row in ROWS} >= {"H100", "A100", "L40S", "RTX 4090"}
    assert all(row["source"] for row in ROWS)
    assert sum(bool(row["blocks"]) for row in ROWS) >= 7


@pytest.mark.parametrize("row", ROWS, ids=[f"{n}-{row['gpu']}" for n, row in enumerate(ROWS)])
def test_settings_equal_settings_of_the_release(row: dict[str, str]) -> None:
    engine = scenario_of(row["command"], row["gpu"], row["release"] or None).engine
    for pair in row["expected"].split():
        name, _, text = pair.partition("=")
        value = getattr(engine, name)
        assert str(value) == text, (name, row["source"])
    if row["blocks"]:
        blocks = getattr(engine, find_engine_spec(engine).memory)
        assert blocks == pytest.approx(int(row["blocks"]), rel=BLOCKS_WITHIN), row["source"]


@pytest.mark.parametrize(
    ("command", "gpu", "release", "count", "largest"),
    [
        # vllm/config.py of 0.9.2: 1, 2, 4 and multiples of 8, whatever max_num_seqs is
        ("vllm serve Qwen/Qwen3-8B --max-num-seqs 16", "H100", "0.9.2", 67, 512),
        ("vllm serve Qwen/Qwen3-8B --max-num-seqs 16", "H100", "0.19.1", 7, 32),
        # config/vllm.py of 0.28.0: four tokens per request with three draft tokens
        (
            "vllm serve Qwen/Qwen3-8B --max-num-seqs 16 --speculative-config "
            '\'{"method":"eagle3","model":"x/y","num_speculative_tokens":3}\'',
            "H100",
            "0.28.0",
            19,
            128,
        ),
        ("vllm serve Qwen/Qwen3-8B", "B200", "0.27.0", 51, 512),
        (
            "vllm serve Qwen/Qwen3-8B --compilation-config "
            "'{\"cudagraph_capture_sizes\":[1,2,4,8,16,32,64]}'",
            "B200",
            "0.28.0",
            7,
            64,
        ),
        # vllm/config.py of 0.9.2: one number is the maximum, several are the sizes
        ("vllm serve Qwen/Qwen3-8B --cuda-graph-sizes 64", "H100", "0.9.2", 11, 64),
        ("vllm serve Qwen/Qwen3-8B --cuda-graph-sizes 1 32 64", "H100", "0.9.2", 3, 64),
        ("vllm serve Qwen/Qwen3-8B", "B200", "0.28.0", 83, 1024),
    ],
)
def test_sizes_of_cuda_graphs(
    command: str, gpu: str, release: str, count: int, largest: int
) -> None:
    sizes = find_execution_settings(scenario_of(command, gpu, release).engine).graph_sizes
    assert (len(sizes), sizes[-1]) == (count, largest)


@pytest.mark.parametrize("size", ["--num-gpu-blocks-override 20000", "--kv-cache-memory-bytes 8G"])
def test_stated_size_of_the_cache_keeps_the_layer_groups(size: str) -> None:
    plain = scenario_of("vllm serve openai/gpt-oss-20b", "H100", "0.33.0").engine
    stated = scenario_of(f"vllm serve openai/gpt-oss-20b {size}", "H100", "0.33.0").engine
    assert isinstance(plain, VllmConfig)
    assert isinstance(stated, VllmConfig)
    assert plain.kv_cache_groups == stated.kv_cache_groups == (0, 128)
    assert stated.num_gpu_blocks < plain.num_gpu_blocks


def test_size_of_the_cache_in_bytes_requires_hardware() -> None:
    data = {"engine": {"name": "vllm", "kv_cache_memory_bytes": 1 << 30}}
    with pytest.raises(InputError, match="requires hardware with gpu and model"):
        resolve_defaults(data, Path())


@pytest.mark.parametrize(
    ("command", "release", "note"),
    [
        ("vllm serve Qwen/Qwen3-8B --no-enable-chunked-prefill", "0.9.2", "ignores --no-enable-ch"),
        ("vllm serve Qwen/Qwen3-8B -O0", "0.9.2", "ignores -O0"),
        ("vllm serve Qwen/Qwen3-8B --swap-space 4", "0.28.0", "not have: --swap-space 4"),
        ("vllm serve Qwen/Qwen3-8B --disable-log-requests", "0.28.0", "--disable-log-requests"),
        ("vllm serve Qwen/Qwen3-8B --disable-prefix-caching", "0.28.0", "--disable-prefix-cach"),
        ("vllm serve Qwen/Qwen3-8B --stream-interval 4 -O1", "0.9.2", "have: --stream-interval 4"),
        ("VLLM_USE_V1=0 vllm serve Qwen/Qwen3-8B", "0.9.2", "not modelled: VLLM_USE_V1=0: the V0"),
    ],
)
def test_options_without_effect_in_a_release_are_noted(
    command: str, release: str, note: str
) -> None:
    options = ScenarioOptions(gpu="H100", version=release, from_command=command, num_prompts=1)
    assert note in "\n".join(build_scenario(options).notes)


@pytest.mark.parametrize("release", ["0.9.2", "0.33.0"])
def test_options_of_a_release_are_not_called_absent(release: str) -> None:
    command = (
        "vllm serve Qwen/Qwen3-8B --disable-log-requests --max-num-seqs 8 -tp 1 "
        "--no-enable-prefix-caching --enforce-eager --port 8001 --seed 0 --load-format auto"
    )
    options = ScenarioOptions(gpu="H100", version=release, from_command=command, num_prompts=1)
    assert "does not have" not in "\n".join(build_scenario(options).notes)


def effects(command: str) -> dict[str, str]:
    return {one.text: one.effect for one in read_launch_line(command).options}


def test_every_option_is_listed_with_its_effect() -> None:
    command = (
        "vllm serve Qwen/Qwen3-8B --max-num-seqs 64 --port 8001 "
        "--limit-mm-per-prompt '{\"image\":1}'"
        " --guided-decoding-backend=xgrammar --trust-remote-code --brand-new-feature on"
    )
    assert effects(command) == {
        "--max-num-seqs 64": "used",
        "--port 8001": "ignored",
        "--limit-mm-per-prompt '{\"image\":1}'": "not modelled",
        "--guided-decoding-backend xgrammar": "not modelled",
        "--trust-remote-code": "ignored",
        "--brand-new-feature on": "unknown",
    }
    reasons = "\n".join(read_launch_line(command).summary())
    assert "encoder" in reasons
    assert "structured output" in reasons
    assert "--brand-new-feature on" in reasons


@pytest.mark.parametrize("engine", [name for name, spec in ENGINES.items() if spec.server_options])
def test_each_flag_of_the_config_is_an_option_of_the_server(engine: str) -> None:
    from simkv.core.engine_flags import flags

    server = ENGINES[engine].server_options
    assert server
    unknown = [
        flag
        for flag in flags(ENGINES[engine].config).values()
        if server.find(flag, negatable=False) is None
    ]
    assert unknown == []
    assert all(server.find(name, negatable=False) for name in server.converted)


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("MODEL=Qwen/Qwen3-8B\nvllm serve $MODEL \\\n  --max-num-seqs ${N:-32} | tee log", {}),
        ("sudo nohup vllm serve Qwen/Qwen3-8B --max_num_seqs=32 > log 2>&1 &", {}),
        ("bash -c 'vllm serve Qwen/Qwen3-8B --max-num-seqs 32'", {}),
        ("uvx vllm@0.12.0 serve Qwen/Qwen3-8B --max-num-seqs 32", {}),
        ("vllm serve Qwen/Qwen3-8B --max-num-seqs 32 -tp=2", {"hardware.tp": 2}),
        (
            "vllm serve --model Qwen/Qwen3-8B --max-num-seqs 32 -cc.cudagraph_mode none",
            {"engine.cudagraph_mode": "NONE"},
        ),
        (
            "vllm serve Qwen/Qwen3-8B --max-num-seqs 32 --speculative-config "
            '\'{"method": "eagle3", "num_speculative_tokens": 3, "model": "x/y"}\'',
            {"engine.num_speculative_tokens": 3, "engine.speculative_method": "eagle"},
        ),
        *(
            (
                "vllm serve Qwen/Qwen3-8B --max-num-seqs 32 --speculative-config "
                f'\'{{"method": "{method}", "num_speculative_tokens": 2}}\'',
                {"engine.num_speculative_tokens": 2, "engine.speculative_method": "mtp"},
            )
            for method in ("mtp", "deepseek_mtp", "qwen3_next_mtp")
        ),
    ],
)
def test_shell_forms(command: str, fields: dict[str, object]) -> None:
    line = read_launch_line(command)
    assert line.model == "Qwen/Qwen3-8B"
    assert line.fields == {"engine.max_num_seqs": 32, **fields}


def test_compose_files(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(
        """\
services:
  web: {image: nginx}
  llm:
    image: vllm/vllm-openai:v0.11.0
    command: --model Qwen/Qwen3-8B --max-num-seqs 48
    environment: [HF_TOKEN=x]
  other:
    image: lmsysorg/sglang:v0.5.20
    command: [python3, -m, sglang.launch_server, --model-path, Qwen/Qwen3-8B]
"""
    )
    with pytest.raises(
        InputError, match=f"contains 2 servers; choose one of them: {file}:llm, {file}:other"
    ):
        read_launch_line(str(file))
    line = read_launch_line(f"{file}:llm")
    assert (line.version, line.fields) == ("0.11.0", {"engine.max_num_seqs": 48})
    assert read_launch_line(f"{file}:other").engine == "sglang"


@pytest.mark.parametrize(
    ("command", "listed"),
    [
        ("export A=1 B=2\nC=3 vllm serve X", "A=1, B=2, C=3"),
        ("A=1\nB=2\nexport A\nvllm serve X", "A=1"),
        ("export A=1; bash -c 'export B=2; vllm serve X'", "A=1, B=2"),
        ("export A=1\ndocker run -e B=2 vllm/vllm-openai:v0.11.0 --model X", "B=2"),
    ],
)
def test_environment_variables_are_listed(command: str, listed: str) -> None:
    assert read_launch_line(command).summary() == [f"ignored (no effect on scheduling): {listed}"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ls -l", "no launch command of a server"),
        ("start.sh", "^--from-command start.sh: this file does not exist"),
        ("none.yaml:llm", "^--from-command none.yaml:llm: this file does not exist"),
        ("deploy/start", "^--from-command deploy/start: this file does not exist"),
        ("vllm serve X --max-num-seqz 3", "did you mean '--max-num-seqs'"),
        ("vllm serve X --max-num-seqs", "expected a value"),
        ("vllm serve $M", r"\$M: the variable \$M has no value"),
        ("vllm serve X --max-num 3", "ambiguous option"),
        ("vllm serve 'X", "not a valid command"),
        ("vllm serve X -tp two", "expected a whole number"),
        ("vllm serve X --speculative-config {method:mtp}", "expected a JSON mapping; found"),
        ("vllm serve X\nvllm serve Y", "2 launch commands"),
        ("vllm serve X --enable-chunked-prefill=False", "expected --no-enable-chunked-prefill"),
        ("vllm serve X --enable-chunked-prefill=true", "without a value"),
        ("x" * 5000, "no launch command of a server"),
    ],
)
def test_bad_lines_are_one_message(command: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_launch_line(command)


def test_data_parallel_ranks_become_replicas_or_ranks_in_lockstep() -> None:
    dense = scenario_of("vllm serve Qwen/Qwen3-8B -dp 2")
    assert dense.fleet
    assert (dense.fleet.size, dense.fleet.lockstep) == (2, False)
    experts = scenario_of("vllm serve Qwen/Qwen3-30B-A3B -dp 2 --enable-expert-parallel")
    assert experts.fleet
    assert experts.hardware
    assert (experts.fleet.lockstep, experts.hardware.dp, experts.hardware.ep) == (True, 2, 2)


@pytest.mark.parametrize(
    ("line", "kernels"),
    [
        ("VLLM_MXFP4_USE_MARLIN=1 vllm serve openai/gpt-oss-20b", ["marlin"]),
        ("VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1 vllm serve openai/gpt-oss-20b", ["mxfp8"]),
        ("VLLM_MXFP4_USE_MARLIN=0 vllm serve openai/gpt-oss-20b", []),
    ],
)
def test_variables_select_kernels(line: str, kernels: list[str]) -> None:
    found = scenario_of(line).hardware
    assert found
    assert found.kernels == kernels


def test_errors_name_the_option_of_the_line() -> None:
    with pytest.raises(InputError, match=r"^--from-command: --max-num-seqs 0: engine.max_num_seqs"):
        scenario_of("vllm serve Qwen/Qwen3-8B --max-num-seqs 0")
    with pytest.raises(InputError, match=r"^--from-command: --block-size x: engine.block_size"):
        scenario_of("vllm serve Qwen/Qwen3-8B --block-size x --max-model-len auto")
    with pytest.raises(InputError, match=r"^--gpu H10: hardware.gpu: unknown GPU"):
        scenario_of("vllm serve Qwen/Qwen3-8B", gpu="H10")


@pytest.mark.parametrize(
    ("text", "value"),
    [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("true", True), ("0.9", 0.9), ("auto", "auto")],
)
def test_values_of_options(text: str, value: object) -> None:
    assert parse_option_value(text) == value


def test_unset_variables_matter_only_in_options_with_an_effect(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    text = """\
services:
  web: {image: "${WEB_IMAGE}"}
  llm:
    image: vllm/vllm-openai:v0.11.0
    command: --model Qwen/Qwen3-8B OPTION --max-num-seqs 48 --served-model-name ${NAME}
"""
    file.write_text(text.replace("OPTION", "--api-key=${KEY}"))
    line = read_launch_line(str(file))
    assert line.fields == {"engine.max_num_seqs": 48}
    ignored = 'ignored (no effect on scheduling): --api-key $API_KEY, --served-model-name "${NAME}"'
    assert line.summary() == [ignored]
    for option in ("-tp $N", "--max-num-batched-tokens=${N}", "--config $N", "$N"):
        file.write_text(text.replace("OPTION", option))
        with pytest.raises(InputError, match=r"the variable \$N has no value"):
            read_launch_line(str(file))
    file.write_text(text.replace("OPTION", "").replace("v0.11.0", "${TAG}"))
    with pytest.raises(InputError, match=r"services.llm.image: the variable \$TAG has no value"):
        read_launch_line(str(file))


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve Qwen/Qwen3-8B --ssl-keyfile-password abc123",
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --admin-api-key abc123",
        "VLLM_API_KEY=abc123 vllm serve Qwen/Qwen3-8B",
        "docker run -e HF_TOKEN=abc123 vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-8B",
    ],
)
def test_no_secret_is_printed(command: str) -> None:
    summary = " ".join(read_launch_line(command).summary())
    assert "abc123" not in summary
    assert "$" in summary


def test_secrets_are_not_printed() -> None:
    for command in (
        "vllm serve Qwen/Qwen3-8B --api-key abc123",
        "vllm serve Qwen/Qwen3-8B --api-key=abc123",
    ):
        line = read_launch_line(command)
        assert "abc123" not in repr(line.options)
        assert "$API_KEY" in " ".join(line.summary())


SCRIPT = """#!/bin/bash
TP=2
ARGS=(
  --tensor-parallel-size "$TP"  # two GPUs
  --max-model-len 32768
)
ARGS+=(--max-num-seqs 256)
exec vllm serve "Qwen/Qwen3-14B" "${ARGS[@]}" --port 8000 %s
"""


def test_arrays_of_a_script_are_expanded(tmp_path: Path) -> None:
    (tmp_path / "start.sh").write_text(SCRIPT % '"$@"')
    fields = read_launch_line(str(tmp_path / "start.sh")).fields
    assert fields["hardware.tp"] == 2
    assert fields["engine.max_model_len"] == 32768
    assert fields["engine.max_num_seqs"] == 256


@pytest.mark.parametrize("rest", ['"${MORE[@]}"', "$MORE", "$(cat args)"])
def test_unknown_words_of_a_script_are_an_error(tmp_path: Path, rest: str) -> None:
    (tmp_path / "start.sh").write_text(SCRIPT % rest)
    with pytest.raises(InputError, match="replace it with its value"):
        read_launch_line(str(tmp_path / "start.sh"))
