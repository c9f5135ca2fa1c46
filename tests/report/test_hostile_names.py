"""Tests that names from users are shown unchanged, and never interpreted as HTML, Markdown or
markup.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.figure import Figure
from rich.table import Table
from typer.testing import CliRunner

from dev.serving_points import points_page
from simkv.cli import app
from simkv.cli.command_support import console, show
from simkv.core.markdown_text import escape_markdown
from simkv.incident.diagnosis_document import request_label
from simkv.incident.measured_answer import listed_section
from simkv.metrics.scenario_runner import run_scenario
from simkv.report.plot_style import plot_settings, set_log_scale
from simkv.report.run_explanation import explain_run
from simkv.scenario.scenario_loader import load

HOSTILE = "<script>alert(1)</script>|[x](javascript:1)`$\\frac{[/red]\n# x"


def test_markdown_shows_request_ids_literally() -> None:
    observed = pd.DataFrame({"request": [HOSTILE]})
    text = escape_markdown(request_label(observed, 0))
    assert "<" not in text
    assert "\n" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\|\\[x\\](javascript:1)\\`$" in text
    assert "<script>" not in "\n".join(listed_section("Notes", [HOSTILE]))
    assert escape_markdown("> 10 s -> 5 s") == "&gt; 10 s -> 5 s"


def test_console_ignores_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("[/red]name :smile:")
    table.add_row("[bold]x[/nothing]")
    show(table, on=console())
    said = capsys.readouterr().out
    assert "[/red]name :smile:" in said
    assert "[bold]x[/nothing]" in said


def test_logarithmic_axes_have_plain_numbers() -> None:
    with plot_settings():
        figure = Figure()
        axes = figure.subplots()
        axes.plot([30, 300_000], [30, 300_000])
        for which in ("x", "y"):
            set_log_scale(axes, which)
        figure.canvas.draw()
        labels = [one.get_text() for one in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    assert "1000" in labels
    assert not any("$" in label for label in labels)
    assert plt.rcParams["text.parse_math"]


def test_plot_of_measured_points_has_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with plot_settings():
        axes = Figure().subplots()
        points_page._panel(axes, [], [], 0)
        axes.plot([5, 200], [5, 200])
        axes.figure.canvas.draw()
        assert not any("$" in one.get_text() for one in axes.get_xticklabels())


SCENARIO = """
name: hostile
summary: "<script>alert(1)</script> $\\\\frac{ [/red]"
workload: {burst: {num_prompts: 3, prompt_tokens: 40, output_tokens: 5}}
engine: {name: vllm, num_gpu_blocks: 600}
profile: unit-step
"""


def test_run_with_plots_and_report(tmp_path: Path) -> None:
    (tmp_path / "a b.yaml").write_text(SCENARIO)
    out = str(tmp_path / "out")
    ran = CliRunner().invoke(app, ["run", str(tmp_path / "a b.yaml"), "--plots", "--out", out])
    assert ran.exit_code == 0, ran.output
    report = ["report", out, "--no-whatif", "--out", str(tmp_path / "page.html")]
    assert CliRunner().invoke(app, report).exit_code == 0
    assert "<script>alert" not in (tmp_path / "page.html").read_text()
    said = CliRunner().invoke(app, ["explain", str(tmp_path / "a b.yaml")]).stdout
    assert f"Explain one request: simkv explain '{tmp_path / 'a b.yaml'}' " in said


def test_server_hint_is_a_url(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    (scenario,) = load(tmp_path / "s.yaml", []).values()
    result = run_scenario(scenario, tmp_path, intervals=False)
    lines = list(explain_run("s", result, "curl …/explain/{}".format))
    assert lines[-1].startswith("Explain one request: curl …/explain/")
    assert lines[-1].partition("/explain/")[2].isdigit()
