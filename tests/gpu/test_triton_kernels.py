"""Tests of the Triton kernels without a GPU: a fake driver makes Triton build each kernel for sm_90
exactly as on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from simkv.core.errors import InputError
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import BatchRow
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu import scenario_execution
from simkv.gpu.batch_inputs import StepSize, input_views, packed_length
from simkv.gpu.batch_runner import Runner, RunnerConfig
from simkv.gpu.execution_record import GpuSetup
from simkv.gpu.scenario_execution import runner_config
from tests.laws.pressure_scenarios import plain_scenario

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

from simkv.gpu import cuda_ops, triton_kernels, triton_tile_configs  # noqa: E402
from simkv.gpu.triton_tile_configs import Tiles, override_tiles  # noqa: E402
from tests.gpu import compile_kernels  # noqa: E402


@pytest.fixture
def built():
    with compile_kernels.compiling(90) as found:
        yield found


def run_steps(shape: Any, block_size: int) -> None:
    """Run a prefill step, a decode step and a mixed step through a layer of the shape's width."""
    small = replace(shape, layers=1, vocab=64, intermediate=256)
    config = RunnerConfig(num_blocks=128, block_size=block_size, max_len=64, max_decodes=8)
    runner = Runner(small, config, "cpu", torch.bfloat16)
    runner.model.ops = cuda_ops
    tables = {0: list(range(1, 41)), 1: list(range(41, 81))}
    for i in tables:
        runner.admit(Prompt(i, 30, 8))
    runner.launch([BatchRow(0, 30, 0)], {0}, tables)
    runner.launch([BatchRow(0, 1, 30)], {0}, tables)
    runner.launch([BatchRow(0, 1, 31), BatchRow(1, 30, 0)], {0, 1}, tables)


def test_all_kernels_build_for_hopper_without_spills(built):
    """The next tile of keys and values is loaded while the current tile is computed."""
    shape = MODEL_SHAPES["llama-3-8b"]
    run_steps(shape, 16)
    names = {"decode", "reduce", "prefill", "add_norm", "rotate_and_store", "silu_mul"}
    assert built.keys() == names
    for name in names:
        for kernel in {id(kernel): kernel for kernel in built[name]}.values():
            assert compile_kernels.wrong_with(name, kernel, 90) == []
    assert all("mma" in kernel.asm["ptx"] for kernel in built["decode"])
    assert all("cp.async" in kernel.asm["ptx"] for kernel in built["decode"])
    for name in ("decode", "prefill"):
        tile = triton_tile_configs.candidates(name, shape.head_dim, 2, 90)[0].tile
        keys_and_values = 2 * tile * shape.head_dim * 2
        assert all(kernel.metadata.shared > 2 * keys_and_values for kernel in built[name])


def test_programs_that_run_together_read_the_same_blocks(built):
    """The programs of the key-value heads of a row are adjacent, because heads are the first grid
    dimension.
    """
    grids = {}
    launch = triton.runtime.jit.JITFunction.run

    def noted(self, *arguments, grid, **options):
        grids[self.__name__] = grid
        return launch(self, *arguments, grid=grid, **options)

    with patch.object(triton.runtime.jit.JITFunction, "run", noted):
        compile_kernels.attend(MODEL_SHAPES["tiny"], 16, torch.bfloat16, compile_kernels.MIXED)
    kv_heads = MODEL_SHAPES["tiny"].kv_heads
    assert grids["decode"][:2] == (kv_heads, compile_kernels.MIXED.decodes)
    assert grids["prefill"][0] == kv_heads
    assert built.keys() == grids.keys()


#: Architecture, shape, block size and dtype; `python -m tests.gpu.compile_kernels` has all.
BUILDS = [
    (80, 0, 16, torch.bfloat16),
    (86, 0, 16, torch.bfloat16),
    (89, 1, 1, torch.bfloat16),
    (90, 1, 1, torch.bfloat16),
    (120, 0, 16, torch.bfloat16),
    (120, 0, 16, torch.float32),
]


@pytest.mark.parametrize(("arch", "shape", "block_size", "dtype"), BUILDS, ids=str)
def test_attention_builds_for_every_architecture(arch, shape, block_size, dtype):
    """There is no spill, shared memory suffices, and ``wgmma`` is used where it exists."""
    with compile_kernels.compiling(arch) as built:
        compile_kernels.attend(
            compile_kernels.SHAPES[shape], block_size, dtype, compile_kernels.MIXED
        )
    assert built.keys() == {"decode", "reduce", "prefill"}
    for name, found in built.items():
        wide = dtype == torch.float32
        assert compile_kernels.wrong_with(name, found[0], arch, wide=wide) == []


@pytest.mark.parametrize("arch", [80, 120])
def test_fusions_build_elsewhere_too(arch):
    found = list(compile_kernels.fusions(arch, compile_kernels.SHAPES[0], torch.float32))
    assert len(found) == 4  # add_norm with and without a residual
    assert [wrong for _, wrong in found if wrong] == []


def test_spills_and_too_much_shared_memory_are_detected():
    """With half the warps, registers do not suffice; five stages need too much shared memory on a
    small GPU.
    """
    with compile_kernels.compiling(90) as built, override_tiles("prefill", Tiles(64, 128, 4, 5)):
        compile_kernels.attend(MODEL_SHAPES["llama-3-8b"], 16, torch.bfloat16, StepSize(512, 0, 16))
    (kernel,) = built["prefill"]
    spills, shared = compile_kernels.wrong_with("prefill", kernel, 86)
    assert spills.startswith("spills")
    assert shared.endswith("bytes of shared memory, sm_86 has 101376")


def test_measured_tiles_apply_to_their_device(tmp_path, monkeypatch):
    given = {"NVIDIA X": {"decode 128": [64, 16, 4, 5]}}
    monkeypatch.setattr(triton_tile_configs, "measured_tiles", lambda: given)
    assert triton_tile_configs.choose_tiles("decode", 128, 2, arch=90, device="NVIDIA X") == Tiles(
        64, 16, 4, 5
    )
    for device, dim, size in (("NVIDIA Y", 128, 2), ("NVIDIA X", 64, 2), ("NVIDIA X", 128, 4)):
        usual = triton_tile_configs.candidates("decode", dim, size, 90)[0]
        assert (
            triton_tile_configs.choose_tiles("decode", dim, size, arch=90, device=device) == usual
        )
    with override_tiles("decode", Tiles(1, 2, 3, 4)):
        assert triton_tile_configs.choose_tiles(
            "decode", 128, 2, arch=90, device="NVIDIA X"
        ) == Tiles(1, 2, 3, 4)


@pytest.mark.parametrize(("arch", "expected"), [(90, 90), ("gfx942", 0)])
def test_architecture_of_amd_gpus_is_a_name(arch, expected, monkeypatch):
    target = SimpleNamespace(arch=arch)
    active = SimpleNamespace(get_current_target=lambda: target)
    monkeypatch.setattr(cuda_ops, "driver", SimpleNamespace(active=active))
    assert cuda_ops.architecture() == expected
    assert triton_tile_configs.candidates("prefill", 128, 2, cuda_ops.architecture())


def test_a_kernel_is_built_once_for_all_steps_of_a_size(built):
    """A build in the middle of a run would delay a step."""
    before = triton_kernels.count_builds()
    run_steps(MODEL_SHAPES["qwen2.5-0.5b"], 16)
    assert triton_kernels.count_builds() - before == len(
        {id(k) for name in built for k in built[name]}
    )
    first = {name: {id(kernel) for kernel in kernels} for name, kernels in built.items()}
    run_steps(MODEL_SHAPES["qwen2.5-0.5b"], 16)
    assert {name: {id(kernel) for kernel in kernels} for name, kernels in built.items()} == first


def test_step_size_causes_no_second_build(built):
    """The alignment of the rows in memory depends on their position in the packed inputs."""
    heads, kv_heads, dim = 14, 2, 64
    pool = torch.zeros(4, 2, 16, kv_heads, dim, dtype=torch.bfloat16)
    tables = torch.zeros(4, 64, dtype=torch.int32)
    for size in (StepSize(64, 16, 16), StepSize(64, 13, 16), StepSize(64, 13, 17)):
        fields = input_views(torch.zeros(packed_length(size), dtype=torch.int32), size)
        q = torch.zeros(size.tokens, heads, dim, dtype=torch.bfloat16)
        cuda_ops.attend(q, fields, size, pool[:, 0], pool[:, 1], tables)
    assert {name: len({id(k) for k in kernels}) for name, kernels in built.items()} == {
        "decode": 1, "reduce": 1, "prefill": 1,
    }  # fmt: skip


def test_run_in_which_a_kernel_was_built_is_repeated(monkeypatch):
    scenario = plain_scenario("vllm", "0.33.0")
    setup = GpuSetup(MODEL_SHAPES["tiny"], graph_tokens=0)
    runner = Runner(setup.shape, runner_config(scenario, setup), setup.device)
    counts = iter([0, 2, 2, 2])
    monkeypatch.setattr(scenario_execution, "kernel_builds", lambda: next(counts))
    assert (
        scenario_execution.execute_scenario(scenario, setup, runner).summary["kernel_builds"] == 0
    )
    counts = iter([0, 2, 2, 3])
    with pytest.raises(InputError, match="because 1 kernels were compiled during the run"):
        scenario_execution.execute_scenario(scenario, setup, runner)
