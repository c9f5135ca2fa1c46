"""Write a scenario that was built from options as a file with comments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from os.path import relpath
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from simkv.core.field_docs import read_field_docs
from simkv.scenario.hardware_section import HardwareSection
from simkv.scenario.scenario import Scenario
from simkv.scenario.yaml_document import YamlDocument
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.workload.generated_requests import Arrivals
from simkv.workload.workload_section import Workload

#: Name of the file with the JSON schema, in the directory of the scenario.
SCHEMA = "simkv-schema.json"
#: Column in which comments after values begin.
COLUMN = 36


def write_template(
    document: YamlDocument, scenario: Scenario, notes: Sequence[str], folder: Path
) -> str:
    """Return the text of a scenario file for ``folder``, with a comment for each field.

    Settings that the engine's launcher chooses are listed in comments.
    """
    tree = _commented(document.copy().tree)
    workload = tree["workload"]
    if "trace" in workload:
        workload["trace"] = relpath(Path(workload["trace"]).resolve(), folder.resolve())
    spec = find_engine_spec(scenario.engine)
    origins = scenario.origins.engine
    if origins and origins.default:
        rest = [name for name in origins.default if name not in tree["engine"]]
        chosen = [f"{name}: {getattr(scenario.engine, name)}" for name in rest]
        lines = [f"Chosen by the launcher ({origins.source}); remove '# ' to set one:", *chosen]
        # The comment before the next section belongs to the end of the engine section.
        tree.yaml_set_comment_before_after_key("hardware", before="\n".join(lines), indent=2)
    described: tuple[tuple[Any, type], ...] = (
        (tree, Scenario),
        (tree["hardware"], HardwareSection),
        (workload, Workload),
        (workload.get("arrivals"), Arrivals),
        (tree["engine"], spec.config),
    )
    for section, model in described:
        if section is not None:
            _describe(section, _texts(model))
    text = StringIO()
    writer = YAML()
    writer.width = 100
    writer.dump(tree, text)
    header = [f"# yaml-language-server: $schema={SCHEMA}", *(f"# {note}" for note in notes)]
    return "\n".join([*header, text.getvalue()])


def _texts(model: type) -> Mapping[str, str]:
    """Return the first sentence of each field's description."""
    return {name: text.split(". ")[0].rstrip(".") for name, text in read_field_docs(model).items()}


def _commented(node: Any) -> Any:
    if isinstance(node, dict):
        return CommentedMap({key: _commented(value) for key, value in node.items()})
    return [_commented(value) for value in node] if isinstance(node, list) else node


def _describe(section: CommentedMap, texts: Mapping[str, str]) -> None:
    """Add a field's description as a comment."""
    for name, value in section.items():
        text = " ".join(texts.get(name, "").split())
        if not text:
            continue
        if isinstance(value, dict):
            section.yaml_set_comment_before_after_key(name, before=text)
        else:
            section.yaml_add_eol_comment(text, name, column=COLUMN)
