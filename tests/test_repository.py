"""Tests of the files for hosting and contributing: workflows, templates, hooks and policies."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
SUPPORTED = ["3.11", "3.12", "3.13", "3.14"]


def load(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_actions_and_limit_rights_and_time(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"].keys() <= {"contents", "issues"}
    assert "pull_request_target" not in workflow["on"]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+(\.\d+)*|[0-9a-f]{40})", step["uses"])


def test_pushes_and_pull_requests_are_tested_with_every_supported_python() -> None:
    workflow = load(ROOT / ".github/workflows/tests.yml")
    assert {"push", "pull_request"} <= workflow["on"].keys()
    assert workflow["permissions"] == {"contents": "read"}
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    commands = dict.fromkeys(matrix["python"], matrix["command"][0])
    commands |= {job["python"]: job["command"] for job in matrix["include"]}
    assert sorted(commands) == SUPPORTED
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pyproject["project"]["requires-python"] == f">={SUPPORTED[0]}"
    built = pyproject["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{version.replace('.', '')}-*" for version in SUPPORTED]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands.values():
        program, *targets = shlex.split(command)
        assert program == "make" or (ROOT / program).stat().st_mode & 0o100
        for target in targets:
            assert "=" in target or f"\n{target}:" in makefile


def test_only_the_publishing_job_can_publish() -> None:
    """The publishing job needs a tag, and no other job has the identity of the trusted
    publisher.
    """
    jobs = load(ROOT / ".github/workflows/release.yml")["jobs"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["permissions"] == {"contents": "write", "id-token": "write"}
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/')"
    assert sorted(jobs["publish"]["needs"]) == sorted(set(jobs) - {"publish"})


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_have_the_fields_that_hosts_require(path: Path) -> None:
    form = load(path)
    if path.stem == "config":
        assert form.keys() <= {"blank_issues_enabled", "contact_links"}
        return
    assert all(isinstance(form[field], str) and form[field] for field in ("name", "description"))
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids) > 0
    for field in form["body"]:
        assert field["type"] in ("input", "textarea")
        assert field["attributes"]["label"]
        assert field.keys() <= {"type", "id", "attributes", "validations"}
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_pre_commit_hooks_use_the_tools_of_the_virtual_environment() -> None:
    config = load(ROOT / ".pre-commit-config.yaml")
    (repository,) = config["repos"]
    assert repository["repo"] == "local"  # nothing is downloaded, and versions agree with CI
    for hook in repository["hooks"]:
        assert hook.keys() >= {"id", "name", "entry", "language"}
        program, *words = shlex.split(hook["entry"])
        assert program.startswith(".venv/bin/")
        assert all((ROOT / word).exists() for word in words if "/" in word)
    stages = {stage for hook in repository["hooks"] for stage in hook.get("stages", [])}
    assert stages <= {*config["default_install_hook_types"]}


@pytest.mark.parametrize(
    "name",
    ["CODE_OF_CONDUCT.md", "SECURITY.md", "CONTRIBUTING.md", ".github/pull_request_template.md"],
)
def test_links_in_community_files_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target
