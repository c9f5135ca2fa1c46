"""Tests that Python code outside the engines' packages names no engine; differences are attributes
of ``EngineSpec``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.conftest import ROOT

#: Pattern of an engine's name as a word in a string.
NAME = re.compile(
    r"(?<![a-z0-9])(vllm|sglang|fastdeploy|mistralrs|mistral\.rs|trtllm|tensorrt-llm)(?![a-z0-9])",
    re.IGNORECASE,
)
#: Modules of one engine.
OF_ENGINE = re.compile(r"simkv\.(schedulers|native)\.(vllm|sglang|fastdeploy|mistralrs|trtllm)\b")
#: Folders and files of engines, recorders, format readers and writers, and the registry.
PERMITTED = (
    "schedulers/vllm/",
    "schedulers/sglang/",
    "schedulers/fastdeploy/",
    "schedulers/mistralrs/",
    "schedulers/trtllm/",
    "native/",
    "schedulers/engine_registry.py",
    "conformance/record/",
    "workload/formats/",
    "incident/vllm_log_reader.py",
    "incident/sglang_log_reader.py",
    "incident/trtllm_log_reader.py",
    "incident/prometheus_reader.py",
    "incident/emit/",
    "costs/sources/",
)
#: Other exceptions with reasons. An unnecessary entry fails a test below.
ALLOWED = {
    "cli/check_scheduler.py": "writes custom rules out as plug-ins of vLLM",
    "cli/record.py": "arguments of the recorders",
    "costs/front_end_costs.py": "packaged measurements of API servers",
    "costs/operators/operator_tables.py": "folders of aiconfigurator's operator tables",
    "conformance/policy_export.py": "writes custom rules out as plug-ins of vLLM",
    "conformance/vllm_policy_code.py": "writes evolved rules out as plug-ins of vLLM",
    "validation/": "replays measurements of vLLM and SGLang servers as their files name them",
    "scenario/custom/vllm_policy.py": "base class of custom rules over the decisions of vLLM",
}
#: Names of arguments whose text is only for people.
SHOWN = {"help", "metavar", "description", "title"}


def names_in(code: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of code that name an engine, with the text."""
    tree = ast.parse(code)
    shown = {id(part) for node in ast.walk(tree) for part in texts(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in shown and NAME.search(node.value):
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in modules if OF_ENGINE.match(name))
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if OF_ENGINE.match(a.name))


def texts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield constants below a node that are text for people: docstrings and help."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value
    if isinstance(node, ast.keyword) and node.arg in SHOWN:
        yield from ast.walk(node.value)


def found() -> dict[str, list[str]]:
    """Return the places outside the exceptions that name an engine, by file."""
    package = ROOT / "simkv"
    files: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith(PERMITTED):
            lines = [f"{line}: {how}" for line, how in names_in(path.read_text(encoding="utf-8"))]
            if lines:
                files[name] = lines
    return files


def test_code_names_no_engine() -> None:
    others = {k: v for k, v in found().items() if not k.startswith(tuple(ALLOWED))}
    assert others == {}


def test_every_exception_is_needed() -> None:
    files = found()
    assert [one for one in ALLOWED if not any(name.startswith(one) for name in files)] == []
    missing = {one for one in PERMITTED if not (ROOT / "simkv" / one).exists()}
    assert missing <= {"native/"}  # the position is kept


def test_detects_planted_names() -> None:
    planted = (
        '"""Of vLLM."""\n'
        "from simkv.schedulers.vllm.spec import VLLM\n"
        "from simkv.schedulers import sglang\n"
        "import simkv.schedulers.trtllm\n"
        "if engine == 'vllm':\n"
        "    raise ValueError(f'{x}: expected SGLang')\n"
        "option(help='vllm or sglang')\n"
        "x = 'vllm_flash' + 'vllmish'\n"
    )
    assert {line for line, _ in names_in(planted)} == {2, 3, 4, 5, 6, 8}
