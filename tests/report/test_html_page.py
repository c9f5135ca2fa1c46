"""Tests of the HTML report: affected requests, causes and fixes in one file."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.explain.ledger_kinds import COMPUTE_KINDS
from simkv.explain.wait_attribution import find_block_holdings
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file
from simkv.report import chart_data, narrative
from simkv.report.html_page import DARK_THEME, LIGHT_THEME, library, render_html, write_html
from simkv.report.lanes_plot import BARS
from simkv.report.plot_style import sort_requests_by_arrival
from simkv.report.report_gallery import write_gallery
from simkv.report.report_runs import find_report_path, find_runs, find_scenario_file
from simkv.scenario.packaged_scenarios import PackagedIncident
from simkv.scenario.run_fields import find_differences
from tests.report.browser import Browser, Page, chromium

STARVING = """
name: starving
report: https://example.org/starving
summary: Forty requests & <b>an old rule</b> </script><script>alert(1)</script>.
workload: {burst: {num_prompts: 40, prompt_tokens: 500, output_tokens: 100, interval: 1.0}}
engine: {name: mistralrs, variant: bucketed, block_size: 32, num_gpu_blocks: 1025}
profile: l4-mistralrs-slow-prefill
timeout: 300
variants:
  before: {}
  after: {engine: {variant: pr2034}}
provenance: {given: [a given thing], fitted: [a fitted thing], assumed: [an assumed thing]}
published:
  after: {figures: {starved: 0, makespan_s: 200.0}, note: a note}
expect:
  before: {verdict: starved}
  after: {verdict: served}
"""
MANY = """
name: many
workload:
  arrivals: {num_prompts: 1500, request_rate: 60,
             prompt_tokens: {distribution: lognormal, mean: 512},
             output_tokens: {distribution: lognormal, mean: 128}}
engine: {name: vllm, num_gpu_blocks: 1200, max_model_len: 8192, enable_prefix_caching: false}
profile: unit-step
"""


class Outline(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._quiet = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._quiet += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._quiet -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._quiet:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    (folder / "starving.yaml").write_text(STARVING, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, RunResult]:
    return run_file(folder / "starving.yaml")


@pytest.fixture(scope="module")
def page(results: dict[str, RunResult]) -> str:
    return render_html(results, ["engine.rule: old → new: 24 starved → 0"])


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    return Outline(page)


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    found: dict[str, Any] = json.loads(text)
    return found


def unpacked(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    runs = column["runs"]
    return [v for v, n in zip(runs[::2], runs[1::2], strict=True) for _ in range(n)]


# Text


def test_affected_requests_cause_and_fix_come_first(outline: Outline) -> None:
    text = outline.text
    places = [text.index(heading) for heading in ("Affected", "Cause", "Fix")]
    assert places == sorted(places)
    assert text.index("16 of 40 finished, 24 starved.") < text.index("Every request over time")
    assert "Requests 16 to 39 (starved; clients gave up after 300 s)." in text
    assert "Variant after serves all requests." in text
    assert "It changes engine.variant: bucketed → pr2034." in text
    assert "engine.rule: old → new: 24 starved → 0" in text


def test_lists_sources_and_expectations(outline: Outline) -> None:
    text = outline.text
    for part in ("a given thing", "a fitted thing", "an assumed thing", "a note"):
        assert part in text
    assert "l4-mistralrs-slow-prefill" in text
    assert "after: makespan_s" in text
    assert "expected" in text


def test_text_from_files_is_escaped(page: str, outline: Outline) -> None:
    assert "<script>alert(1)" not in page
    assert "Forty requests & <b>an old rule</b>" in outline.text
    assert all("alert(1)" not in str(attributes) for _, attributes in outline.elements)


def test_data_with_special_characters_is_escaped(results: dict[str, RunResult]) -> None:
    odd = {"</script><!--": results["before"]}
    assert [v["name"] for v in data_of(render_html(odd))["variants"]] == list(odd)


def test_reports_that_no_request_failed(results: dict[str, RunResult]) -> None:
    said = narrative.describe_affected(results["after"])
    assert len(said) == 1
    assert said[0].startswith("none. Slowest: request ")
    assert narrative.describe_fix({"after": results["after"]}, "after", None) == [
        "No other variant was run."
    ]


def test_cancelled_requests_are_not_listed_as_unserved(page: str) -> None:
    served = {one["key"]: one["served"] for one in data_of(page)["outcomes"]}
    assert {key for key, value in served.items() if value} == {"finished", "cancelled"}
    assert narrative.format_served({"requests": 9, "finished": 4, "cancelled": 5}) == "all requests"
    assert (
        narrative.format_served({"requests": 9, "finished": 4, "cancelled": 3}) == "7 of 9 requests"
    )


def test_best_fix_serves_most_with_fewest_changes(folder: Path) -> None:
    text = STARVING.replace(
        "  after: {engine: {variant: pr2034}}",
        "  far: {engine: {variant: pr2034}, workload: {burst: {interval: 1.5}}}\n"
        "  after: {engine: {variant: pr2034}}\n"
        "  worse: {timeout: 100}",
    )
    (folder / "more.yaml").write_text(text, encoding="utf-8")
    results = run_file(folder / "more.yaml")
    assert narrative.select_variant(results) == "before"
    assert narrative.find_better_variant(results, "before") == "after"
    assert (
        narrative.find_better_variant(
            {name: results[name] for name in ("before", "worse")}, "before"
        )
        is None
    )
    assert [
        str(c) for c in find_differences(results["before"].scenario, results["far"].scenario)
    ] == [
        "engine.variant: bucketed → pr2034",
        "workload.burst.interval: 1.0 → 1.5",
    ]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([3], "request 3"),
        ([4, 3], "requests 3, 4"),
        ([16, 17, 18, 20], "requests 16 to 18, 20"),
        (range(0, 40, 2), "requests 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ids_are_shown_as_ranges(ids: list[int], text: str) -> None:
    assert narrative.format_request_ids(ids) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (0.0421, "42.1 ms"), (0.5, "0.50 s"), (12.34, "12.3 s"), (1234.5, "1,234 s")],
)
def test_seconds_have_three_digits(value: float, text: str) -> None:
    assert narrative.format_seconds(value) == text


# File


def test_page_is_self_contained(outline: Outline) -> None:
    assert not outline.all("link")
    assert not outline.all("img")
    assert all("src" not in script for script in outline.all("script"))
    (policy,) = [m for m in outline.all("meta") if "http-equiv" in m]
    assert "default-src 'none'" in str(policy["content"])


def test_page_is_accessible(outline: Outline) -> None:
    assert outline.all("html") == [{"lang": "en"}]
    assert len(outline.all("h1")) == 1
    for heading in outline.all("th"):
        assert heading.get("scope") in ("col", "row")
    for figure in (e for e in outline.all("div") if e.get("class") == "chart"):
        assert figure["role"] == "img"
        assert figure["tabindex"] == "0"
        assert figure["aria-label"]
    formats = [b.get("data-save") for b in outline.all("button") if "data-save" in b]
    assert formats.count("png") == formats.count("svg") == formats.count("csv")
    assert formats.count("png") == len(outline.all("figure")) == 8


def test_both_themes_define_all_colors() -> None:
    for theme in (LIGHT_THEME, DARK_THEME):
        for kind in (*chart_data.CODES, *BARS):
            assert re.fullmatch("#[0-9A-F]{6}", theme[f"kind-{kind}"])
        assert {f"owner-{i}" for i in range(1, chart_data.MAX_OWNERS + 1)} <= theme.keys()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT_THEME, DARK_THEME])
def test_text_has_contrast_in_both_themes(theme: dict[str, str]) -> None:
    for ground in ("paper", "card"):
        for text in ("ink", "muted", "link", "good", "bad"):
            assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
        for line in ("blue", "red", "purple"):
            assert contrast(theme[line], theme[ground]) >= 3.0, (line, ground)


def test_same_run_gives_the_same_bytes(folder: Path, page: str) -> None:
    again = run_file(folder / "starving.yaml")
    assert render_html(again, ["engine.rule: old → new: 24 starved → 0"]) == page


def test_shared_files_are_stored_beside_the_pages(results: dict[str, RunResult]) -> None:
    page = render_html(results, shared=True)
    assert len(page) < 300_000 < len(library()) < 1_600_000
    outline = Outline(page)
    assert [s.get("src") for s in outline.all("script")[1:]] == ["plotly.min.js", "report.js"]
    assert [link["href"] for link in outline.all("link")] == ["report.css"]


def test_page_embeds_the_compressed_library(page: str) -> None:
    (packed,) = re.findall(r'<script type="application/gzip" id="library">([^<]*)</script>', page)
    assert gzip.decompress(base64.b64decode(packed)).decode().replace("</script", "<\\/script") == (
        library()
    )
    assert len(page) < 1_500_000


# Data


def test_ledger_intervals_add_up_to_each_request(page: str, results: dict[str, RunResult]) -> None:
    found = data_of(page)
    tick = found["tick"]
    for variant in found["variants"]:
        record = results[variant["name"]].record
        lanes, requests = variant["lanes"], variant["requests"]
        assert lanes["of"] == list(range(len(record.requests)))
        start = 0
        for place, count in zip(lanes["of"], lanes["count"], strict=True):
            kinds = [found["kinds"][ord(c) - 65] for c in lanes["kinds"][start : start + count]]
            lasts = lanes["lasts"][start : start + count]
            start += count
            life = record.requests[unpacked(requests["id"])[place]]
            mine = sum(last for kind, last in zip(kinds, lasts, strict=True) if kind["life"])
            assert life.ended_at is not None
            assert mine * tick == pytest.approx(life.ended_at - life.request.arrival, abs=2 * tick)
        assert start == len(lanes["kinds"]) == len(lanes["lasts"])
        assert sum(variant["totals"]) == pytest.approx(
            sum((life.ended_at or 0) - life.request.arrival for life in record.requests.values())
        )


def test_time_resolution_is_a_millionth_of_the_run() -> None:
    for span in (0.003, 1.0, 617.2, 86_400.0):
        ticks = chart_data.TickScale(span)
        assert span / 1e7 <= ticks.seconds <= span / 1e6 * 1.0000001
        assert ticks.of(span) * ticks.seconds == pytest.approx(span, rel=1e-6)


def test_blocks_by_owner_match_the_step_log(page: str, results: dict[str, RunResult]) -> None:
    for variant in data_of(page)["variants"]:
        record = results[variant["name"]].record
        owners = variant["owners"]
        assert owners["total"] == record.num_blocks
        assert len(owners["ids"]) == len(owners["held"]) <= chart_data.MAX_OWNERS
        series = [unpacked(column) for column in (*owners["held"], owners["others"])]
        for values in zip(*series, strict=True):
            held = sum(values)
            assert -1e-9 <= held <= record.num_blocks * 1.001


def test_latency_curve_ends_at_the_served_share(page: str) -> None:
    before, after = (variant["curves"]["e2e"] for variant in data_of(page)["variants"])
    assert before[-1][1] == pytest.approx(100 * 16 / 40)
    assert after[-1][1] == pytest.approx(100.0)
    assert [x for x, _ in after] == sorted(x for x, _ in after)


@pytest.mark.parametrize("column", [[], [1], [1, 2, 3], [None] * 9 + [0.5, 0.5], [0] * 5])
def test_packed_columns_are_unchanged(column: list[float | None]) -> None:
    assert unpacked(chart_data.pack_column(column)) == column
    assert len(json.dumps(chart_data.pack_column(column))) <= max(len(json.dumps(column)), 20)


def test_samples_lanes_of_large_runs(results: dict[str, RunResult]) -> None:
    record, found = results["before"].record, results["before"].diagnosis
    shows = chart_data.find_lane_stretches(record, found.ledger)
    total = sum(map(len, shows.values()))
    lanes = chart_data.lane_columns(record, shows, chart_data.TickScale(600.0), most=total // 2)
    assert len(lanes["of"]) == len(lanes["count"]) == 20
    assert len(lanes["kinds"]) == len(lanes["lasts"]) == sum(lanes["count"]) < 0.75 * total
    lives = sorted(record.requests.values(), key=lambda life: life.request.arrival)
    assert {lives[place].outcome for place in lanes["of"]} == {Outcome.FINISHED, Outcome.STARVED}


@pytest.mark.parametrize(
    ("wanted", "most", "granted"),
    [
        ([10, 20], 100, [10, 20]),
        ([10, 200], 100, [10, 90]),
        ([500, 200, 30], 90, [30, 30, 30]),
        ([], 5, []),
    ],
)
def test_lane_budget_is_shared_fairly(wanted: list[int], most: int, granted: list[int]) -> None:
    assert chart_data.split_fairly(wanted, most) == granted


# Selection of runs


def test_finds_runs_by_directory_file_and_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "mine"
    done = CliRunner().invoke(
        app, ["run", str(folder / "starving.yaml"), "--out", str(run), "--no-plots", "--exit-zero"]
    )
    assert done.exit_code == 0, done.output
    assert (
        list(find_runs([run])) == list(find_runs([folder / "starving.yaml"])) == ["before", "after"]
    )
    assert "after" in find_runs([Path("mistralrs-six")])
    assert list(find_runs([run, folder / "starving.yaml"]))[0::2] == [
        "mine/before",
        "starving/before",
    ]
    assert find_report_path([run]) == run / "report.html"
    assert find_report_path([Path("mistralrs-six")]) == Path("runs/mistralrs-six.html")
    with pytest.raises(InputError, match="has no scenario"):
        find_scenario_file(tmp_path)
    with pytest.raises(InputError, match="duplicate name"):
        find_runs([run, run])


def test_directory_and_file_give_the_same_report(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    runner.invoke(app, ["run", str(folder / "starving.yaml"), "--out", "mine", "--no-plots"])
    for run, out in (("mine", "a.html"), (str(folder / "starving.yaml"), "b.html")):
        done = runner.invoke(app, ["report", run, "--out", out, "--no-whatif"])
        assert done.exit_code == 0, done.output
    a, b = ((tmp_path / name).read_text(encoding="utf-8") for name in ("a.html", "b.html"))
    assert data_of(a) == data_of(b)
    done = runner.invoke(app, ["report", "--no-whatif", "mine"])
    assert (tmp_path / "mine" / "report.html").is_file()


def test_gallery_has_one_library_and_an_index(folder: Path, tmp_path: Path) -> None:
    variants = {
        name: result.scenario for name, result in run_file(folder / "starving.yaml").items()
    }
    target = tmp_path / "gallery"
    written = write_gallery(
        target, [PackagedIncident(folder / "starving.yaml", variants)], whatif=False
    )
    common = {"plotly.min.js", "report.js", "report.css", "index.html"}
    assert {path.name for path in written} == common | {"starving.html"}
    index = Outline((target / "index.html").read_text(encoding="utf-8"))
    assert "starving.html" in [a.get("href") for a in index.all("a")]
    assert "16 of 40 finished, 24 starved" in index.text
    assert len(index.all("svg")) == 2
    (target / "old.html").write_text("", encoding="utf-8")
    write_gallery(target, [])
    assert {path.name for path in target.iterdir()} == common
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="contains other files"):
        write_gallery(other, [])


# Browser tests


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("no Chromium on this machine; install one (Debian: apt-get install chromium)")
    with Browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture(scope="module")
def file(folder: Path, page: str) -> Path:
    path = folder / "starving.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def big(folder: Path) -> Path:
    (folder / "many.yaml").write_text(MANY, encoding="utf-8")
    write_html(folder / "many.html", run_file(folder / "many.yaml"))
    return folder / "many.html"


def opened(browser: Browser, path: Path, width: int = 1280, *, dark: bool = False) -> Page:
    page = browser.open(path, width, dark=dark)
    page.wait("document.documentElement.dataset.ready === 'yes'")
    return page


def where(page: Page, time: float, lane: float) -> tuple[float, float]:
    """Scroll to the lanes and return the position of a time and lane in the left panel."""
    page.run("document.getElementById('figure-lanes').scrollIntoView({behavior: 'instant'})")
    x, y = page.run(
        f"""(() => {{
          const box = charts.get("lanes"), {{ left, top }} = box.getBoundingClientRect();
          const {{ xaxis, yaxis }} = box._fullLayout;
          return [left + xaxis._offset + xaxis.d2p({time}),
                  top + yaxis._offset + yaxis.d2p({lane})];
        }})()"""
    )
    return x, y


def point_at(page: Page, time: float, lane: float) -> tuple[float, float]:
    """Move the mouse to a time and lane of the left panel; return the position."""
    x, y = where(page, time, lane)
    page.move(x - 4, y)
    page.move(x, y)
    return x, y


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_renders(browser: Browser, file: Path, width: int, dark: bool, tmp_path: Path) -> None:
    page = opened(browser, file, width, dark=dark)
    assert page.run("document.querySelectorAll('.chart .main-svg').length") >= 8
    assert page.run("document.documentElement.scrollWidth") <= width
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    r, g, b = (int(part) for part in re.findall(r"\d+", ground)[:3])
    assert (r + g + b < 200) is dark
    paper = page.run("charts.get('lanes')._fullLayout.paper_bgcolor")
    assert paper == (DARK_THEME if dark else LIGHT_THEME)["paper"]
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000
    assert page.complaints() == []
    assert [
        url for url in page.requested() if not url.startswith(("file:", "data:", "blob:"))
    ] == []


def test_hovering_shows_a_request(browser: Browser, file: Path) -> None:
    page = opened(browser, file)
    x, y = point_at(page, 200.0, 20)
    page.wait("!document.getElementById('tip').hidden")
    text = page.run("document.getElementById('tip').innerText")
    assert "request 20" in text
    assert "starved" in text
    assert "500 + 100 tokens" in text
    page.click(x, y)
    page.wait("document.querySelector('#inspected h3').innerText.includes('Request 20')")
    assert page.complaints() == []


def test_arrow_keys_step_through_requests(browser: Browser, file: Path) -> None:
    page = opened(browser, file)
    page.run("inspect(0, 20); charts.get('lanes').focus()")
    page.press("ArrowDown")
    assert page.run("document.querySelector('#inspected h3').innerText") == "Request 21 of before"
    page.press("ArrowUp")
    page.press("ArrowUp")
    assert page.run("document.querySelector('#inspected h3').innerText") == "Request 19 of before"
    assert page.run("document.activeElement === charts.get('lanes')")


def test_touch_scrolls_and_tap_shows_a_request(browser: Browser, file: Path) -> None:
    page = opened(browser, file, 390)
    x, y = where(page, 200.0, 20)
    before = page.run("scrollY")
    page.swipe(x, y, up=200)
    page.wait(f"scrollY > {before} + 100")
    page = opened(browser, file, 390)  # at a point where nothing moves anymore
    page.swipe(*where(page, 200.0, 20))
    page.wait("document.querySelector('#inspected h3').innerText.includes('Request 20')")
    assert "request 20" in page.run("document.getElementById('tip').innerText")
    assert page.run("document.getElementById('tip').hidden") is False


def test_theme_change_redraws_the_figures(browser: Browser, file: Path) -> None:
    page = opened(browser, file)
    page.theme(dark=True)
    page.wait(f"charts.get('latency')._fullLayout.paper_bgcolor === '{DARK_THEME['paper']}'")


def test_every_figure_exports_png_svg_and_csv(browser: Browser, file: Path) -> None:
    page = opened(browser, file)
    for figure in page.run("[...charts.keys()]"):
        find = f"FIGURES.find(({{ id }}) => id === '{figure}')"
        for format, magic in (("png", "data:image/png;base64,iVBOR"), ("svg", "data:image/svg")):
            url = page.run(
                f"""(() => {{ const {{ data, layout }} = forFile({find});
                return Plotly.toImage({{ data, layout }}, {{ format: '{format}', scale: 1,
                  width: layout.width, height: layout.height }}); }})()"""
            )
            assert url.startswith(magic), (figure, format)
            assert len(url) > 5_000
        head, *rows = page.run(f"{find}.csv(pairNow())")
        assert rows, figure
        assert all(len(row) == len(head) for row in rows)
    assert page.run("FIGURES.find(({ id }) => id === 'lanes').csv(pairNow()).length") > 1000
    assert page.complaints() == []


def test_the_buttons_save_files(browser: Browser, file: Path, tmp_path: Path) -> None:
    page = opened(browser, file)
    folder = str(tmp_path)
    browser.call("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": folder})
    for format in ("csv", "svg", "png"):
        page.run(f"document.querySelector('#figure-ledger [data-save={format}]').click()")
        target = tmp_path / f"starving-ledger.{format}"
        page.wait_for(target.is_file)
    text = (tmp_path / "starving-ledger.csv").read_text(encoding="utf-8")
    assert text.startswith("variant,kind,seconds_in_all,seconds_per_request\nbefore,")


def test_script_urls_are_not_links(browser: Browser, folder: Path) -> None:
    """A script URL that passed validation is shown as text; no link executes code."""
    result = run_file(folder / "starving.yaml")["before"]
    hostile = {
        "report": "javascript:document.title='caught'",
        "summary": "[x](javascript:alert(1))",
    }
    scenario = result.scenario.model_copy(update=hostile)
    write_html(folder / "hostile.html", {"before": replace(result, scenario=scenario)})
    page = opened(browser, folder / "hostile.html")
    links = "[...document.querySelectorAll('a[href]')]"
    page.run(f"{links}.filter(a => a.protocol === 'javascript:').forEach(a => a.click())")
    assert page.run("document.title") != "caught"
    assert page.run(f"{links}.map(a => a.protocol).filter(p => p === 'javascript:')") == []
    assert "javascript:document.title" in page.run("document.body.innerText")


def test_zoom_applies_to_all_figures_with_a_time_axis(browser: Browser, file: Path) -> None:
    page = opened(browser, file)
    page.run(
        "void Plotly.relayout(charts.get('queues'), {'xaxis.range[0]': 50, 'xaxis.range[1]': 150})"
    )
    page.wait("charts.get('lanes')._fullLayout.xaxis.range[1] === 150")
    assert page.run("charts.get('blocks')._fullLayout.xaxis.range") == [50, 150]
    page.run("document.querySelector('#figure-lanes [data-reset]').click()")
    page.wait("charts.get('queues')._fullLayout.xaxis.range[1] > 300")


def test_zooming_in_separates_lanes(browser: Browser, big: Path) -> None:
    page = opened(browser, big)
    rows = "charts.get('lanes').data[0].z.length"
    assert page.run(rows) == 380
    point_at(page, 40.0, 700)
    page.wait("!document.getElementById('tip').hidden")
    assert "zoom in for single requests" in page.run("document.getElementById('tip').innerText")
    page.run(
        "void Plotly.relayout(charts.get('lanes'), {'yaxis.range[0]': 740, 'yaxis.range[1]': 690})"
    )
    page.wait(f"{rows} === 51")
    assert page.run("charts.get('lanes').data[0].dy") == 1
    assert page.run("fillTable(), document.querySelectorAll('#rows tbody tr').length") == 15
    assert page.complaints() == []


def test_table_sorts_filters_and_links_to_requests(browser: Browser, file: Path) -> None:
    page = opened(browser, file)
    page.run("document.querySelector('[data-sort=id]').click()")
    assert page.run("document.querySelector('#rows tbody th').innerText") == "39"
    page.run("document.querySelector('[data-sort=id]').click()")
    assert page.run("document.querySelector('#rows tbody th').innerText") == "0"
    page.run(
        "(() => { const s = document.getElementById('filter'); s.value = 'failed';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert page.run("document.querySelector('#rows tbody th').innerText") == "16"
    assert page.run("document.getElementById('pager').innerText") == "1 to 15 of 24"
    page.run("document.querySelector('#rows tbody button').click()")
    assert page.run("document.querySelector('#inspected h3').innerText") == "Request 16 of before"


def test_prints_in_light_colors(browser: Browser, file: Path, tmp_path: Path) -> None:
    page = opened(browser, file, dark=True)
    page.run(
        "addEventListener('beforeprint', () => {"
        "window.printed = charts.get('lanes')._fullLayout.paper_bgcolor; })"
    )
    page.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert page.run("window.printed") == LIGHT_THEME["paper"]
    assert page.run("charts.get('lanes')._fullLayout.paper_bgcolor") == DARK_THEME["paper"]


def test_selects_two_of_several_variants(
    browser: Browser, results: dict[str, RunResult], tmp_path: Path
) -> None:
    three = {**results, "third": replace(results["after"])}
    write_html(tmp_path / "three.html", three)
    page = opened(browser, tmp_path / "three.html")
    page.run(
        "(() => { const s = document.querySelectorAll('[data-side]')[0]; s.value = '2';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert "third" in page.run("charts.get('lanes').layout.annotations[0].text")
    assert page.run("document.querySelector('#inspected h3').innerText").endswith("of third")
    assert page.complaints() == []


MOMENT = """(() => ({
  time: moment.time,
  panels: [...document.querySelectorAll("#moments section")].map((section) => section.innerText),
}))()"""


def test_inspector_shows_the_step_the_queues_and_their_reasons(
    browser: Browser, file: Path, results: dict[str, RunResult]
) -> None:
    """At a time within a step, the counts and requests agree with the record."""
    page = opened(browser, file)
    record = results["before"].record
    row = len(record.steps) // 2
    at = (record.steps.start[row] + record.steps.end[row]) / 2
    page.run(f"moveTo({at})")
    panels = page.run(MOMENT)["panels"]
    assert len(panels) == 2
    assert f"Step {row + 1:,} of {len(record.steps):,}" in panels[0]
    free = record.steps.free_blocks[row]
    assert f"{free:,} of {record.num_blocks:,} blocks free" in panels[0]
    queues = page.run(
        "(({running, waiting}) => [running, waiting].map((rows) => rows.map(({place}) => place)))"
        "(pairNow()[0].queues)"
    )
    ledger = results["before"].diagnosis.ledger
    now = {
        i: next((one.kind for one in lane if one.start <= at < one.end), None)
        for i, lane in ledger.items()
    }
    waits = {i for i, kind in now.items() if kind and kind not in COMPUTE_KINDS}
    assert {i for i, kind in now.items() if kind in COMPUTE_KINDS} <= set(queues[0])
    assert set(queues[1]) <= waits
    left = {i for i, life in record.requests.items() if (life.ended_at or at) <= at}
    shown = {*queues[0], *queues[1]}
    assert shown - left == {i for i, kind in now.items() if kind}
    assert page.complaints() == []


def test_inspector_moves_by_steps_and_its_address_opens_the_moment(
    browser: Browser, file: Path
) -> None:
    page = opened(browser, file)
    page.run("moveTo(inspected(pairNow()[0]).start[10]); document.getElementById('moment').focus()")
    before = page.run("moment.time")
    page.press("ArrowRight")
    starts = page.run("[...inspected(pairNow()[0]).start.slice(9, 12)]")
    assert [before, page.run("moment.time")] == starts[1:]
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert page.run("moment.time") == starts[0]
    page.run("inspect(0, 20)")
    link = page.run("momentLink()")
    assert link == f"#t={starts[0]:.9g}&request=20"
    page.run("moveTo(0); inspect(0, 3)")
    page.run(f"location.hash = '{link}'")
    page.wait("moment.time > 0")
    assert page.run("moment.time") == pytest.approx(starts[0])
    assert page.run("document.querySelector('#inspected h3').innerText") == "Request 20 of before"


def test_block_counts_of_page_and_record_are_equal(
    page: str, results: dict[str, RunResult]
) -> None:
    """The changes of blocks add up, and no request holds blocks at the end."""
    for raw, result in zip(data_of(page)["variants"], results.values(), strict=True):
        holdings = raw["holdings"]
        assert len(holdings["count"]) == len(raw["lanes"]["of"])
        next_ = 0
        lives = sort_requests_by_arrival(result.record)
        for place, count in zip(raw["lanes"]["of"], holdings["count"], strict=True):
            part = holdings["changes"][next_ : next_ + count]
            assert sum(part) == 0
            spans = find_block_holdings(result.record, lives[place], 32)
            most = max((one.blocks for one in spans), default=0)
            assert max(accumulate(part), default=0) == most
            next_ += count
        assert next_ == len(holdings["gaps"])
