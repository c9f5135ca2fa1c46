"""Select the costs of a recorded run, by the same rule for all runs. The first of these is used:

1. A profile given by the user.
2. A bundle of LLMServingSim's kernel tables for the model and GPU of the run. The bundle is named
   in ``case.json`` under ``calibration``, or is in a folder ``calibration`` in the same directory
   as the run, or in a folder given by the user.
3. The isolated requests of the run (stage ``sync``), which are then not scored.

Data used for calibration is never used for validation.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, load_profile
from simkv.costs.hardware.host_links import HostLink
from simkv.costs.hardware.model_gpu_catalog import known_gpu, known_model
from simkv.costs.sources.llmservingsim_profile import Sharding, bundle_model, bundle_profile
from simkv.costs.sources.measurement_files import read_settings
from simkv.costs.sources.single_request import (
    ModelTraits,
    compute_model_traits,
    read_isolated_requests,
)
from simkv.costs.sources.single_request_fit import fit_single_request_profile
from simkv.schedulers.vllm.execution_settings import graph_sizes
from simkv.validation.recorded_runs.recorded_run import RecordedRun


def calibrate_run(
    case: RecordedRun, given: Path | None = None, tables: Path | None = None
) -> CostProfile:
    """Return the cost profile of a recorded run.

    This is the profile ``given``, if there is one. Otherwise, it is selected by the rule of this
    module.

    Bundles are also searched for in ``tables``. Raises InputError if there is no source of costs.
    """
    if given is not None:
        return load_profile(given.name, given.parent)
    setup, dims = case.facts.engine, case.facts.model_dims
    bundle = find_bundle(case, tables)
    if bundle is not None:
        sizes = graph_sizes(setup.max_num_seqs)
        known = known_model(case.facts.model)
        layout = Sharding(
            dims.layers,
            setup.tensor_parallel,
            dims.hidden or (known.hidden if known else None),
            dims.experts or (known.experts if known else 0),
            dims.experts_per_token or (known.experts_per_token if known else 0),
            setup.expert_ranks,
            _link(case),
        )
        return bundle_profile(bundle, layout, sizes)
    if not case.has_isolated_requests:
        near = ", ".join(folder.name for folder in _bundles(case, tables)) or "none"
        raise InputError(
            f"{case.folder}: no costs for {case.facts.model} on {setup.gpu}, tensor_parallel "
            f"{setup.tensor_parallel}: no kernel tables match (searched: case.json and nearby "
            f"'calibration' folders; found: {near}), and no request of the case ran in "
            "isolation (stage 'sync'); use --profile or --kernel-tables"
        )
    engine = (setup.max_num_batched_tokens, setup.block_size)
    shape = ModelTraits(
        dims.kv_bytes_per_token // setup.tensor_parallel,
        4 * dims.layers * dims.q_heads * dims.head_dim // setup.tensor_parallel,
        *engine,
    )
    if model := known_model(case.facts.model):
        shape = replace(
            compute_model_traits(model, *engine, setup.tensor_parallel),
            kv_bytes_per_token=shape.kv_bytes_per_token,
            flops_per_pair=shape.flops_per_pair,
        )
    return fit_single_request_profile(
        read_isolated_requests(case.table, block_size=setup.block_size, caching=setup.caches),
        shape,
        known_gpu(setup.gpu),
        name=f"{case.name}, fitted to its isolated requests",
        engine=f"{setup.engine} {setup.version}",
        model=case.facts.model,
        on=setup.gpu,
    )


def _link(case: RecordedRun) -> HostLink | None:
    try:
        return case.facts.engine.host_link
    except InputError as error:
        raise InputError(f"{case.folder / 'case.json'}: engine.link: {error}") from error


def find_bundle(case: RecordedRun, tables: Path | None = None) -> Path | None:
    """Return the directory of LLMServingSim's tables for the model and GPU of a run, or None."""
    return next((folder for folder in _bundles(case, tables) if _belongs(folder, case)), None)


def _bundles(case: RecordedRun, tables: Path | None) -> list[Path]:
    given = [] if tables is None else [tables, *sorted(tables.glob("*"))]
    roots = [case.folder, *case.folder.resolve().parents[:2]]
    named = [root / name for root in roots for name in case.facts.calibration]
    beside = [path for root in roots for path in sorted((root / "calibration").glob("*"))]
    found = {f.resolve(): f for f in (*given, *named, *beside) if (f / "meta.yaml").is_file()}
    return list(found.values())


def _belongs(folder: Path, case: RecordedRun) -> bool:
    meta = read_settings(folder / "meta.yaml")
    model = is_same_model(bundle_model(folder), case.facts.model)
    tables = (folder / f"tp{case.facts.engine.tensor_parallel}").is_dir()
    return model and tables and _same_gpu(str(meta.get("gpu", "")), case.facts.engine.gpu)


def is_same_model(one: str, other: str) -> bool:
    """Return whether two names mean the same model: the same weights, or the same known shape."""
    first, second = known_model(one), known_model(other)
    if first is not None and second is not None:
        return first.name == second.name
    return one.casefold() == other.casefold()


def _same_gpu(one: str, other: str) -> bool:
    """Return whether two names mean the same GPU.

    Unknown GPUs are compared by the numbers in their names.
    """
    first, second = known_gpu(one), known_gpu(other)
    if first is not None and second is not None:
        return first.name == second.name
    return _figures(one) <= _figures(other)


def _figures(name: str) -> set[str]:
    return {word for word in re.findall(r"[a-z0-9]+", name.casefold()) if re.search(r"\d", word)}
