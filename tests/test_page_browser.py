"""The page in a browser: sorting, the map by keyboard, themes, excerpts, names for screen readers.

Without Chromium or playwright these tests are skipped, but not in CI.
"""

# ruff: noqa: RUF001 (dashes and minus signs of the page)

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from page_data import SMALL, comparison
from r3.page import render_page

pytestmark = pytest.mark.slow
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

CHROMIUM = shutil.which("chromium")
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ARGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
FRAMES = "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None  # type: ignore[assignment]
    missing = [
        name
        for name, there in (("playwright", sync_playwright), ("chromium", CHROMIUM))
        if not there
    ]
    if missing:
        reason = f"the page is tried in a browser, which needs {' and '.join(missing)}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as tool:
        started = tool.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield started
        started.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a document in a page that may not ask for anything else; problems fail the test."""
    problems: list[str] = []
    contexts = []

    def open_page(data: dict[str, Any], **options: Any) -> Any:
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(render_page(data), encoding="utf-8")
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)

        def only_the_file(route: Any) -> None:
            if route.request.url.split("#")[0] == file.as_uri():
                route.continue_()
            else:
                problems.append(f"request of {route.request.url}")
                route.abort()

        context.route("**/*", only_the_file)
        page = context.new_page()
        page.on("console", lambda m: problems.append(f"console: {m.text}"))
        page.on("pageerror", lambda e: problems.append(f"error: {e}"))
        page.goto(file.as_uri())
        if options.get("java_script_enabled", True):
            page.evaluate(FRAMES)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def test_a_table_is_sorted_by_click_and_by_key(show: Callable[..., Any]) -> None:
    data = comparison(**SMALL | {"rollouts": 12})
    rollouts = data["worst"]["rollouts"]
    rollouts[3]["kl_k3_native"] = None
    page = show(data)
    table = page.locator("table.groups")
    head = table.locator("thead th", has_text="KL k3, native")
    names = lambda: table.locator("tbody tr:not(.panel) th").all_inner_texts()  # noqa: E731
    known = sorted(
        (r for r in rollouts if r["kl_k3_native"] is not None), key=lambda r: r["kl_k3_native"]
    )
    unknown = [rollouts[3]["id"]]
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert [n.split()[-1] for n in names()] == [r["id"] for r in reversed(known)] + unknown
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert [n.split()[-1] for n in names()] == [r["id"] for r in known] + unknown
    other = table.locator("thead th").first
    other.locator("button").focus()
    page.keyboard.press("Space")
    assert other.get_attribute("aria-sort") == "ascending"
    assert head.get_attribute("aria-sort") is None
    # an opened excerpt stays with its rollout
    table.locator("button.open").first.click()
    other.locator("button").click()
    panel = table.locator("tr.panel:visible")
    owner = panel.locator("xpath=preceding-sibling::tr").locator("th").inner_text()
    label = panel.locator("[role=listbox]").get_attribute("aria-label")
    assert f"rollout {owner.split()[-1]}," in label


def test_the_map_by_keyboard(show: Callable[..., Any]) -> None:
    data = comparison(**SMALL)
    page = show(data)
    heat, status = page.locator("#heat"), page.locator("#heat-at")
    assert status.get_attribute("role") == "status"
    assert heat.locator("td[tabindex='0']").count() == 1
    heat.locator("td[tabindex='0']").focus()
    native = data["routing"]["native"]["positions"]

    def expect(layer: int, column: int) -> None:
        width = native["width"]
        text = status.inner_text().replace("\u00a0", " ")
        found = re.fullmatch(
            r"Layer (\d+), positions (\d+) to (\d+): ([\d.]+) % of (\d+) rows.*", text
        )
        assert found, text
        assert [int(found[i]) for i in (1, 2, 3, 5)] == [
            layer,
            column * width,
            (column + 1) * width - 1,
            native["rows"][column],
        ]
        value = 100 * native["cell_disagreement"][column][layer]
        assert float(found[4]) == pytest.approx(value, rel=6e-3)

    expect(0, 0)
    for keys, place in (
        ("ArrowRight", (0, 1)),
        ("ArrowDown", (1, 1)),
        ("End", (1, 4)),
        ("ArrowRight", (1, 4)),  # the edge
        ("Home", (1, 0)),
        ("Control+End", (2, 4)),
        ("ArrowUp", (1, 4)),
        ("ArrowLeft", (1, 3)),
        ("Control+Home", (0, 0)),
    ):
        page.keyboard.press(keys)
        expect(*place)
        assert heat.locator("td[tabindex='0']").count() == 1
        assert page.evaluate("document.activeElement.tagName") == "TD"
    before = heat.locator("td").first.evaluate("e => getComputedStyle(e).backgroundColor")
    page.locator("#heat-choice button", has_text="replay").click()
    assert page.locator("#heat-side").inner_text() == "replay"
    assert "0 % of" in status.inner_text().replace("\u00a0", " ")
    assert "(replay)" in status.inner_text()
    after = heat.locator("td").first.evaluate("e => getComputedStyle(e).backgroundColor")
    assert before != after
    heat.locator("tbody tr").nth(2).locator("td").nth(3).hover()
    assert status.inner_text().startswith("Layer 2, positions 24")


def test_theme_button_and_both_themes(show: Callable[..., Any]) -> None:
    data = comparison(**SMALL)
    shots = {}
    for scheme in ("light", "dark"):
        page = show(data, color_scheme=scheme)
        back = "getComputedStyle(document.body).backgroundColor"
        auto = page.evaluate(back)
        shots[scheme] = page.screenshot()
        button = page.locator("#theme")
        seen = [button.inner_text()]
        colors = [auto]
        for _ in range(3):
            button.click()
            seen.append(button.inner_text())
            colors.append(page.evaluate(back))
        assert seen == ["Theme: auto", "Theme: light", "Theme: dark", "Theme: auto"]
        assert colors[0] == colors[3] == colors[1 if scheme == "light" else 2]
        assert colors[1] != colors[2]
    assert shots["light"] != shots["dark"]


def test_colours_without_light_dark(browser: Any, tmp_path: Path) -> None:
    """A browser of before 2024 shows the same colours: its rules are tried in place of ours."""
    html = render_page(comparison(**SMALL))
    css = html.split("<style>")[1].split("</style>")[0]
    ours, old = css.split("@supports not (color: light-dark(#000, #fff))")
    ours = re.sub(r"--[\w-]+: light-dark\([^)]*\);", "", ours)
    assert "light-dark" not in ours + old
    file = tmp_path / "old.html"
    file.write_text(html.replace(css, f"{ours}@supports (color: #000){old}"), encoding="utf-8")
    new = tmp_path / "new.html"
    new.write_text(html, encoding="utf-8")
    seen: list[list[str]] = []
    colors = """["--bg", "--n4"].map(x => {
        document.body.style.color = `var(${x})`;
        return getComputedStyle(document.body).color; }).join(" ")"""
    for path in (new, file):
        seen.append([])
        for scheme in ("light", "dark"):
            context = browser.new_context(color_scheme=scheme)
            page = context.new_page()
            page.goto(path.as_uri())
            for _ in range(3):
                seen[-1].append(page.evaluate(colors))
                page.locator("#theme").click()
            page.emulate_media(media="print")
            seen[-1].append(page.evaluate(colors))
            context.close()
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 2


@pytest.mark.parametrize("text", [True, False])
def test_a_rollout_opens_to_its_tokens(show: Callable[..., Any], text: bool) -> None:
    data = comparison(**SMALL, text=text)
    rollout = data["worst"]["rollouts"][0]
    excerpt = rollout["excerpt"]
    if text:
        excerpt["text"][3] = "<img src=x>\n"
    excerpt["layers"][4:6] = [3, 0]
    excerpt["logratio_native"][5] = -0.9
    excerpt["prompt_len"] = excerpt["start"] + 2
    page = show(data)
    button = page.locator("button.open").first
    assert button.get_attribute("aria-expanded") == "false"
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    tokens = page.locator("[role=option]")
    assert tokens.count() == len(excerpt["token_ids"])
    shown = tokens.nth(3).inner_text()
    assert shown.strip() == ("<img src=x>⏎" if text else str(excerpt["token_ids"][3]))
    color = "e => getComputedStyle(e).backgroundColor"
    assert tokens.nth(5).evaluate(color) != tokens.nth(6).evaluate(color)
    assert tokens.nth(5).evaluate("e => getComputedStyle(e).borderBottomStyle") == "double"
    assert "3 of 3 layers differ" in (tokens.nth(5).get_attribute("aria-label") or "")
    assert "prompt" in (tokens.nth(1).get_attribute("class") or "")
    assert "prompt" not in (tokens.nth(2).get_attribute("class") or "")
    tokens.nth(4).click()
    page.keyboard.press("ArrowRight")
    readout = page.locator(".sheet .readout")
    assert readout.inner_text() == tokens.nth(5).get_attribute("title")
    assert "log-ratio native −0.900" in readout.inner_text()
    page.locator("#underline button", has_text="replay").click()
    assert tokens.nth(5).evaluate("e => getComputedStyle(e).borderBottomStyle") != "double"
    page.locator("#counts").check()
    assert tokens.nth(5).evaluate("e => getComputedStyle(e, '::after').content") == '"3"'
    button.click()
    assert not page.locator("[role=listbox]").is_visible()


def test_definitions_show_on_focus_and_open_the_glossary(show: Callable[..., Any]) -> None:
    page = show(comparison(**SMALL))
    term, tip = page.locator(".term").nth(4), page.locator("#tip-kl_k3")
    assert not tip.is_visible()
    page.locator(".term").nth(3).focus()
    page.keyboard.press("Tab")
    assert tip.is_visible()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    term.hover()
    assert tip.is_visible()
    page.keyboard.press("Enter")
    page.locator("#term-kl_k3").wait_for(state="visible")


def test_load_of_another_layer_is_drawn_alike(show: Callable[..., Any]) -> None:
    """Script and template draw the same: back at the first layer, path and words are as before."""
    page = show(comparison(**SMALL))
    state = """[...document.querySelectorAll('#load path')].map(p => p.getAttribute('d')).concat(
        [...document.querySelectorAll('#load-scale span')].map(s => s.textContent + s.style.top))"""
    paths, words = page.evaluate(state), page.locator("#load-what").inner_text()
    assert paths[3] == "0\u00a0%100%"  # the lowest tick; share and place
    first = page.locator("#load-layer").input_value()
    page.select_option("#load-layer", str((int(first) + 1) % 3))
    assert page.evaluate(state) != paths
    page.select_option("#load-layer", first)
    assert page.evaluate(state) == paths
    assert page.locator("#load-what").inner_text() == words


def test_a_narrow_window_does_not_scroll_sideways(show: Callable[..., Any]) -> None:
    data = comparison(**SMALL | {"layers": 48, "length": 200, "bins": 100, "excerpt": 100}, steps=4)
    data["worst"]["rollouts"][0]["id"] = "a-long-name/" * 12
    data["files"]["a"]["label"] = "x" * 300
    data["verdict"]["findings"][0]["title"] = "y" * 200
    page = show(data, viewport={"width": 380, "height": 800})
    page.locator("button.open").first.click()
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    boxes = page.locator(".scroll[tabindex='0']")
    assert boxes.count() > 3
    assert all(b.get_attribute("aria-label") for b in boxes.all())


def test_names_for_what_is_not_text(show: Callable[..., Any]) -> None:
    page = show(comparison(**SMALL, steps=4))
    client = page.context.new_cdp_session(page)
    nodes = client.send("Accessibility.getFullAXTree")["nodes"]
    roles: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            role = node.get("role", {}).get("value", "")
            roles.setdefault(role, []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "image", "img", "link", "combobox", "checkbox", "grid", "table"):
        assert all(roles.get(role, [])), (role, roles[role])
    assert len(roles.get("image", []) + roles.get("img", [])) > 8
    assert {"main", "banner", "navigation", "contentinfo"} <= set(roles)
    assert "Share of rows" in roles["grid"][0]


def test_print_and_reduced_motion(show: Callable[..., Any]) -> None:
    page = show(comparison(**SMALL), color_scheme="dark", reduced_motion="reduce")
    html = "getComputedStyle(document.documentElement)"
    assert page.evaluate(f"{html}.scrollBehavior") == "auto"
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(252, 251, 249)"
    assert not page.locator("#theme").is_visible()


def test_without_scripts_the_page_still_says_it(show: Callable[..., Any]) -> None:
    page = show(comparison(**SMALL), java_script_enabled=False)
    assert page.locator("#verdict").is_visible()
    assert page.locator("table.figures").is_visible()
    assert page.locator("noscript p").is_visible()
    assert not page.locator("button:visible").count()


def test_a_big_page_is_small_and_opens(show: Callable[..., Any]) -> None:
    """How quickly it opens is in benchmarks/compare.py."""
    data = comparison(
        layers=48, experts=128, rollouts=24, length=1024, bins=128, excerpt=400, steps=60
    )
    page = show(data)
    assert len(page.content().encode()) < 3_000_000
    assert page.locator("#heat td").count() == 48 * 128
