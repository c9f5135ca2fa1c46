"""``simkv blocks``: how many KV blocks an engine has, reckoned or read from its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from simkv.core.errors import InputError


def blocks(
    model: Annotated[
        str | None, typer.Option(help="The model's name, or its Hugging Face config.json.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="The GPU's name.")] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Read an engine's log.")] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per block (default: the launcher's; for a log 16)."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Default 0.92; 0.9 up to vLLM 0.19."),
    ] = None,
    mem_fraction_static: Annotated[
        float | None,
        typer.Option(min=0.01, max=0.99, help="SGLang's share; left out, it is derived as there."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per step, or SGLang's chunk (default: the launcher's)."),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, help="Running requests (default: the launcher's)."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="GPUs that share the experts as whole ones.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Groups of GPUs that attend apart.")] = 1,
    weights: Annotated[str | None, typer.Option(help="bf16, fp8, fp8_block, nvfp4, ...")] = None,
    attention: Annotated[str | None, typer.Option(help="Weights of attention, if other.")] = None,
    experts: Annotated[str | None, typer.Option(help="Weights of experts, if other.")] = None,
    kv: Annotated[str | None, typer.Option(help="The KV cache: bf16, fp8 or nvfp4.")] = None,
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    variant: Annotated[
        str | None, typer.Option(help="The engine's version; left out, its newest here.")
    ] = None,
) -> None:
    """Print the number of KV blocks: as the engine would find it, or as its log tells.

    Reckoned from the GPU's memory, the weights and an estimate of the largest step; how far that
    is off what engines were seen to log is in docs/hardware.md.
    """
    if log is not None:
        from simkv.costs.hardware.logs import cache_size

        told = cache_size(log, block_size or 16)
        print(f"num_gpu_blocks: {told.blocks}")
        print(
            f"{told.tokens} tokens in blocks of {told.block_size}; {told.engine}, {log}:{told.line}"
        )
        return
    if model is None or gpu is None:
        raise InputError("--model and --gpu are needed, or --log")
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
    if engine == "sglang":
        knobs = {
            "page_size": block_size,
            "chunked_prefill_size": max_num_batched_tokens,
            "max_running_requests": max_num_seqs,
            "mem_fraction_static": mem_fraction_static,
            **({"enable_dp_attention": True, "dp_size": dp} if dp > 1 else {}),
        }
        other = ("--gpu-memory-utilization", gpu_memory_utilization, "--mem-fraction-static")
    else:
        knobs = {
            "block_size": block_size,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "gpu_memory_utilization": gpu_memory_utilization,
        }
        other = ("--mem-fraction-static", mem_fraction_static, "--gpu-memory-utilization")
    if other[1] is not None:
        raise InputError(f"{other[0]}: {engine} has no such flag; its own is {other[2]}")
    _reckon(engine, _said(given), _said({**knobs, "variant": variant}))


#: Settings with a line of their own.
_PRINTED = ("kv_cache_groups", "mamba_prefill_checkpoints")


def _said(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _reckon(engine: str, given: dict[str, Any], knobs: dict[str, Any]) -> None:
    from pydantic import ValidationError

    from simkv.core.errors import nearest
    from simkv.core.launch import LaunchError
    from simkv.costs.hardware.blocks import kv_room
    from simkv.costs.hardware.setting import setting_of
    from simkv.scenario.defaults import launched
    from simkv.scenario.hardware import HardwareSection, hardware_of
    from simkv.schedulers.registry import ENGINES

    if engine not in ("vllm", "sglang"):
        raise InputError(f"--engine {engine}: expected vllm or sglang")
    spec = ENGINES[engine]
    if (variant := knobs.get("variant")) and variant not in spec.variants:
        raise InputError(
            f"--variant {variant}: not known{nearest(variant, spec.variants)}; "
            f"expected one of {', '.join(spec.variants)}"
        )
    try:
        section = HardwareSection.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"--{first['loc'][0]} {first['input']}: {message}") from error
    hardware, refusal = hardware_of(section), ""
    try:
        try:
            found = launched(spec, knobs, hardware)
        except LaunchError as error:
            if error.field != spec.longest:
                raise InputError(str(error)) from error
            refusal = str(error)
            knobs = {**knobs, "startup_check": False}
            found = launched(spec, knobs, hardware)
            del found[spec.longest]
        config = spec.config(**found)
    except ValueError as error:
        raise InputError(f"--{str(error).replace('_', '-')}") from error
    room = kv_room(hardware, setting_of(config))
    print(f"{spec.memory}: {found[spec.memory]}")
    for name in (name for name in (spec.groups, spec.checkpoints) if name in found):
        print(f"{name}: {json.dumps(found[name]).replace(chr(34), '')}")
    others = [name for name in found if name not in (*knobs, *_PRINTED) and name != spec.memory]
    if others:
        said = ", ".join(f"{name} {found[name]}" for name in others)
        print(f"{said} (default of {spec.name} {config.variant} on {hardware.gpu.name})")
    print(
        f"{room.hardware.gpu.name}: {room.usable / 1e9:.2f} GB usable, {room.weights / 1e9:.2f} GB "
        f"weights, {room.activations / 1e9:.2f} GB largest step, {room.outside / 1e9:.2f} GB "
        f"outside torch; {room.block_bytes / 1e6:.3f} MB per block"
    )
    if refusal:
        print(refusal)
