"""What vLLM is to the rest of simkv."""

from __future__ import annotations

from simkv.core.engine import EngineSpec, Naming, Tabled, Transfer
from simkv.core.errors import InputError
from simkv.schedulers.vllm.admission import admission
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.recording import RECORDING
from simkv.schedulers.vllm.ruled import RuledVllm
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.seams import SEAMS
from simkv.schedulers.vllm.setting import setting_of
from simkv.schedulers.vllm.swap import VllmSwapScheduler
from simkv.schedulers.vllm.transfer import VllmTransferScheduler
from simkv.schedulers.vllm.versions import (
    RULES,
    VARIANTS,
    VllmRules,
    assumed,
    like,
    rules_of,
    variant_of,
)


def build(
    config: VllmConfig, rules: VllmRules | None = None, *, tables: bool = False
) -> VllmScheduler:
    """The scheduler of ``config.variant``, or of other ``rules`` than its.

    With ``tables`` it hands out real blocks in any case.
    """
    swaps = rules_of(config.variant).swaps
    of = VllmSwapScheduler if swaps else RuledVllm if config.rule else VllmScheduler
    return of(config, rules, tables=tables)


def _with_tables(config: VllmConfig) -> Tabled:
    chooses = config.policy == "priority" or config.rule is not None
    if chooses and not rules_of(config.variant).drops_victims:
        raise InputError(
            f"policy: under priority or a rule vLLM {config.variant} computes requests whose "
            "blocks are gone, which no device can follow; only fcfs"
        )
    scheduler = build(config, tables=True)
    assert scheduler.memory.tables is not None
    return Tabled(scheduler, scheduler.memory.tables.tables)


VLLM = EngineSpec(
    name="vllm",
    config=VllmConfig,
    variants=VARIANTS,
    build=build,
    with_tables=_with_tables,
    recording=RECORDING,
    setting=setting_of,
    cache_lines=(
        r"# (?:GPU|cuda) blocks: (?P<blocks>[\d,]+)",
        r"num_gpu_blocks(?:_override)?[=: ]+(?P<blocks>[1-9][\d,]*)\b",
        r"GPU KV cache size: (?P<tokens>[\d,]+) tokens",
    ),
    cache_example="vLLM's '# GPU blocks: 2588' or 'GPU KV cache size: 41,408 tokens'",
    memory="num_gpu_blocks",
    longest="max_model_len",
    lora="enable_lora",
    lacks={
        variant: (*rules.fixed, *(("rule",) if rules.skip_blocked or rules.swaps else ()))
        for variant, rules in RULES.items()
    },
    admission=admission,
    transfer=Transfer(("0.33.0", "0.19.0", "0.11.0"), VllmTransferScheduler),
    naming=Naming(variant_of, like, assumed),
    seams=SEAMS,
)
