"""Tests with one bug at a time planted in the engine: the other tests of this folder must detect
each bug.
"""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu import (
    batch_inputs,
    batch_runner,
    cpu_ops,
    cuda_graphs,
    transformer,
)
from tests.gpu import random_scheduler, test_attention, test_transformer
from tests.gpu.random_scheduler import RandomServer

#: Module, original code, and its faulty replacement.
ATTENTION = [
    (cpu_ops, "< length[:, None]\n    k, v = (torch", "<= length[:, None]\n    k, v = (torch"),
    (cpu_ops, "index * block_size < length", "index * block_size <= length"),
    (cpu_ops, "<= at[:, None]", "< at[:, None] + 2"),
    (cpu_ops, "torch.arange(length - len(q), length", "torch.arange(0, len(q)"),
    (
        cpu_ops,
        "x[blocks].flatten(1, 2) for x in (keys, values)",
        "x[blocks].flatten(1, 2) for x in (keys, keys)",
    ),
    (batch_inputs, "context + tokens, out", "context + tokens - 1, out"),
    (
        batch_inputs,
        "fields.start[1 : len(prefills) + 1] = ends",
        "fields.start[1 : len(prefills) + 1] = begins",
    ),
]
MODEL = [
    (cpu_ops, "right * cos + left * sin", "right * cos - left * sin"),
    (cpu_ops, "slot // block_size, slot % block_size", "slot // block_size, slot % block_size * 0"),
    (cpu_ops, "values[block, offset] = v", "values[block, offset] = k"),
    (transformer, "fields.start[1:] - 1", "fields.start[1:] - 2"),
    (transformer, "position // block_size]", "position // (block_size + 1)]"),
    (batch_inputs, "fields.position[:count] = context", "fields.position[:count] = context + 1"),
    (batch_inputs, "np.repeat(context - begins, tokens)", "np.repeat(-begins, tokens)"),
    (batch_inputs, "np.where(silent, np.int32(scratch), seat)", "seat"),
    (batch_inputs, "if known is not table:", "if False:"),
    (batch_inputs, "new = list(table[sent:needed])", "new = list(table[: needed - sent])"),
    (batch_runner, "enumerate(prefills, size.decodes)", "enumerate(prefills)"),
    (
        cuda_graphs,
        "input_views(self.buffer, size), size)",
        "input_views(self.buffer, size), size).flip(0)",
    ),
]


@pytest.fixture
def plant(monkeypatch):
    """Replace a module by a copy in which one part of the source is replaced."""

    def planted(module: ModuleType, old: str, new: str) -> None:
        source = inspect.getsource(module)
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the source"
        mutant = ModuleType(module.__name__)
        mutant.__dict__.update({"__file__": module.__file__, "__package__": module.__package__})
        monkeypatch.setitem(__import__("sys").modules, module.__name__, mutant)
        exec(compile(source.replace(old, new), module.__file__, "exec"), mutant.__dict__)
        for user in (
            cpu_ops,
            cuda_graphs,
            batch_inputs,
            transformer,
            batch_runner,
            random_scheduler,
            test_attention,
        ):
            for name, value in list(vars(user).items()):
                if value is module:
                    monkeypatch.setattr(user, name, mutant)
                elif getattr(value, "__module__", None) == module.__name__ and hasattr(
                    mutant, name
                ):
                    monkeypatch.setattr(user, name, getattr(mutant, name))

    return planted


def name_of(value: object) -> str:
    return value.__name__.split(".")[-1] if isinstance(value, ModuleType) else ""


@pytest.mark.parametrize(("module", "old", "new"), ATTENTION, ids=name_of)
def test_attention_detects(module, old, new, plant):
    assert not attention_fails()
    plant(module, old, new)
    assert attention_fails()


@pytest.mark.parametrize(("module", "old", "new"), MODEL, ids=name_of)
def test_model_detects(module, old, new, plant):
    plant(module, old, new)
    assert model_fails()


def attention_fails() -> bool:
    for seed in range(4):
        c = test_attention.case(seed, 8, 2, 32, 8, "block")
        try:
            found = test_attention.cpu_ops.attend(c.q, c.fields, c.size, c.keys, c.values, c.tables)
        except (IndexError, RuntimeError):
            return True
        if not test_attention.worst(found, c.expected) < 1e-6:
            return True
    return False


def model_fails() -> bool:
    for seed in range(3):
        server = RandomServer(seed, MODEL_SHAPES["tiny"], block_size=4)
        try:
            if test_transformer.wrong_tokens(server):
                return True
        except (AssertionError, IndexError, RuntimeError):
            return True
    return False


def test_model_is_correct_without_bugs():
    assert not model_fails()


@pytest.mark.parametrize(
    "module", [cpu_ops, cuda_graphs, batch_inputs, transformer, batch_runner], ids=name_of
)
def test_planting_nothing_changes_nothing(module, plant):
    line = '"""'  # the first string opens the module's docstring
    source = inspect.getsource(module)
    plant(module, source[: source.index(line) + 20], source[: source.index(line) + 20])
    assert not attention_fails()
    assert not model_fails()
