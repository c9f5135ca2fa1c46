"""``simkv blocks``: number of KV cache blocks of an engine, computed or read from its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.command_support import AsJson, print_json
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.core.engine_spec import EngineSpec


def blocks(
    model: Annotated[
        str | None, typer.Option(help="Model name, or a Hugging Face config.json.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU name (`simkv profile list` shows them).")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read the number of blocks from this server log instead of computing it.",
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per KV block (default: the engine's default; 16 with --log).",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Fraction of GPU memory that vLLM may use (default: 0.92; 0.9 for vLLM 0.19 "
            "and older).",
        ),
    ] = None,
    mem_fraction_static: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=0.99,
            help="Fraction of GPU memory that SGLang may use (default: computed as SGLang does).",
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of tokens per step; for SGLang, the chunk size (default: the "
            "engine's default).",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of running requests (default: the engine's default)."
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallel size.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data parallel size of the attention layers.")] = 1,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Number format of the weights: bf16, fp8, fp8_block, nvfp4, ... (default: the "
            "format of the published model).",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Number format of the attention weights (default: the value of --weights).",
        ),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Number format of the expert weights (default: the value of --weights).",
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Number format of the KV cache: bf16, fp8 or nvfp4 (default: bf16).",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="vllm|sglang", help="Engine name (default: vllm)."),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Engine version (default: the newest version that simkv supports).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the number of KV cache blocks of an engine.

    The number follows from the memory of the GPU, the size of the weights and an estimate of the
    memory that the largest step needs. With --log, the number is read from a server log instead.
    docs/hardware.md compares computed numbers with logs of real servers.
    """
    if log is not None:
        from simkv.costs.hardware.cache_size_log import read_cache_size

        told = read_cache_size(log, block_size or 16)
        if as_json:
            settings = {"num_gpu_blocks": told.blocks, "block_size": told.block_size}
            _print_answer({**settings, "tokens": told.tokens, "engine": told.engine}, {}, "")
            return
        print(f"num_gpu_blocks: {told.blocks}")
        print(
            f"{told.tokens} tokens in blocks of {told.block_size}; {told.engine}, {log}:{told.line}"
        )
        return
    if model is None or gpu is None:
        raise InputError("expected --model and --gpu, or --log")
    given = {
        "gpu": gpu,
        "model": model,
        "tp": tp,
        "ep": ep,
        "dp": dp,
        "weights": weights,
        "attention": attention,
        "experts": experts,
        "kv": kv,
    }
    from simkv.schedulers.engine_registry import DEFAULT, ENGINES

    engine = engine or DEFAULT.name
    able = {name: spec.memory_share for name, spec in ENGINES.items() if spec.memory_share}
    if engine not in able:
        raise InputError(f"--engine {engine}: expected {' or '.join(sorted(able, reverse=True))}")
    spec, own = ENGINES[engine], able[engine]
    shares = {
        "gpu_memory_utilization": gpu_memory_utilization,
        "mem_fraction_static": mem_fraction_static,
    }
    for share, value in shares.items():
        if value is not None and share != own:
            flag, other = (f"--{name.replace('_', '-')}" for name in (share, own))
            raise InputError(f"{flag}: {engine} has no such flag; use {other}")
    knobs = {
        spec.block: block_size,
        spec.step_tokens: max_num_batched_tokens,
        spec.seats: max_num_seqs,
        own: shares[own],
        **spec.rank_knobs(dp),
    }
    _reckon(spec, _said(given), _said({**knobs, "variant": variant}), as_json)


#: Settings that are printed on separate lines.
_PRINTED = ("kv_cache_groups", "mamba_prefill_checkpoints")


def _print_answer(settings: dict[str, Any], memory: dict[str, int], refusal: str) -> None:
    from simkv.report.json_answers import BlocksAnswer

    print_json(BlocksAnswer(settings=settings, memory_bytes=memory, refusal=refusal))


def _said(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _reckon(spec: EngineSpec, given: dict[str, Any], knobs: dict[str, Any], as_json: bool) -> None:
    from pydantic import ValidationError

    from simkv.core.errors import spelling_hint
    from simkv.core.launcher_rules import LaunchError
    from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
    from simkv.costs.hardware.kv_capacity import compute_kv_capacity
    from simkv.scenario.hardware_section import HardwareSection, build_hardware
    from simkv.scenario.launch_defaults import launch_defaults

    if (variant := knobs.get("variant")) and variant not in spec.variants:
        raise InputError(
            f"--variant {variant}: unknown version{spelling_hint(variant, spec.variants)}; "
            f"expected one of {', '.join(spec.variants)}"
        )
    try:
        section = HardwareSection.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"--{first['loc'][0]} {first['input']}: {message}") from error
    hardware, refusal = build_hardware(section), ""
    try:
        try:
            found = launch_defaults(spec, knobs, hardware)
        except LaunchError as error:
            if error.field != spec.longest:
                raise InputError(str(error)) from error
            refusal = str(error)
            knobs = {**knobs, "startup_check": False}
            found = launch_defaults(spec, knobs, hardware)
            del found[spec.longest]
        config = spec.config(**found)
    except ValueError as error:
        raise InputError(f"--{str(error).replace('_', '-')}") from error
    room = compute_kv_capacity(hardware, find_execution_settings(config))
    if as_json:
        memory = {
            "usable": room.usable,
            "weights": room.weights,
            "activations": room.activations,
            "outside_torch": room.outside,
            "per_block": room.block_bytes,
        }
        _print_answer(found, memory, refusal)
        return
    print(f"{spec.memory}: {found[spec.memory]}")
    for name in (name for name in (spec.groups, spec.checkpoints) if name in found):
        print(f"{name}: {json.dumps(found[name]).replace(chr(34), '')}")
    others = [name for name in found if name not in (*knobs, *_PRINTED) and name != spec.memory]
    if others:
        said = ", ".join(f"{name} {found[name]}" for name in others)
        print(f"{said} (default of {spec.name} {config.variant} on {hardware.gpu.name})")
    print(
        f"{room.hardware.gpu.name}: {room.usable / 1e9:.2f} GB usable, {room.weights / 1e9:.2f} GB "
        f"weights, {room.activations / 1e9:.2f} GB activations of the largest step, "
        f"{room.outside / 1e9:.2f} GB outside torch; {room.block_bytes / 1e6:.3f} MB per block"
    )
    if refusal:
        print(refusal)
