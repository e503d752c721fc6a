"""The page of a comparison: what it says, that it holds no foreign markup, how it is used."""

# ruff: noqa: RUF001 (dashes and minus signs of the page)

from __future__ import annotations

import copy
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from page_data import SMALL, charts_unwritten, comparison, no_rows, only_steps
from r3.errors import MissingDependencyError
from r3.page import render_page
from r3.page.numbers import change, edge, number, share, signed, tiny, visible
from r3.page.words import SECTIONS

pytestmark = pytest.mark.slow  # a page takes a second to write
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

VOID = {"meta", "link", "br", "input", "hr", "img"}


class Page(HTMLParser):
    """Elements in order as (tag, attributes, text directly inside), and checks of nesting."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.html = html
        self.feed(html)
        self.close()
        assert not self.open, [self.elements[i][0] for i in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open[-1]][0] == tag, f"</{tag}> closes {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for i in self.open:
            self.elements[i][2].append(data)

    def all(self, tag: str, **attrs: str) -> list[tuple[dict[str, str | None], str]]:
        return [
            (a, " ".join("".join(text).split()))
            for t, a, text in self.elements
            if t == tag and all(a.get(k.replace("_", "-")) == v for k, v in attrs.items())
        ]

    def one(self, tag: str, **attrs: str) -> str:
        (found,) = self.all(tag, **attrs)
        return found[1]

    @property
    def ids(self) -> list[str]:
        return [a["id"] or "" for _, a, _ in self.elements if "id" in a]

    @property
    def document(self) -> Any:
        return json.loads(self.html.split('id="data">')[1].split("</script>")[0])

    def check(self) -> Page:
        """What holds of every page, whatever the document."""
        assert len(self.ids) == len(set(self.ids))
        levels = [int(t[1]) for t, _, _ in self.elements if re.fullmatch("h[1-6]", t)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b <= a + 1 for a, b in pairwise(levels)), levels
        for tag, attrs, _ in self.elements:
            for name, value in attrs.items():
                assert not name.startswith("on"), (tag, name)
                if name in ("href", "src", "action", "srcset", "data") and value != "data:,":
                    assert value
                    assert value[0] == "#", (tag, name, value)
                    assert value[1:] in self.ids, (tag, value)
                if name in ("aria-labelledby", "aria-describedby", "aria-controls"):
                    assert set((value or "").split()) <= set(self.ids), (tag, value)
            assert tag not in ("iframe", "object", "embed", "base", "form")
        css = self.one("style")
        assert "url(" not in css
        assert "@import" not in css
        markup = self.html.split('<script type="application/json"')[0]
        assert "http" not in re.sub(r"http-equiv", "", markup)
        policy = self.all("meta", http_equiv="Content-Security-Policy")[0][0]["content"]
        assert policy == (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
            "img-src data:"
        )
        for attrs, _ in self.all("div", role="img"):
            assert attrs.get("aria-label") or attrs.get("aria-labelledby")
        tables = self.all("table")
        captions = self.all("caption")
        assert len(captions) == len(tables) - len(self.all("table", role="grid"))
        assert all(text for _, text in captions)
        assert all(a.get("scope") in ("col", "row") for a, _ in self.all("th"))
        assert not re.findall(r"[>\"]\s*(?:nan|inf|None|NaN)\s*[<\"%]", markup)
        return self


DOCUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "whole": lambda: comparison(**SMALL, steps=5),
    "routing only": lambda: comparison(**SMALL, replay=False, logprobs=False, margins=False),
    "no replay": lambda: comparison(**SMALL, replay=False),
    "only steps": only_steps,
    "one step": lambda: only_steps(1),
    "no rows": no_rows,
    "one layer, one expert": lambda: comparison(
        **SMALL | {"layers": 1, "experts": 1, "top_k": 1}, text=False
    ),
    "94 layers, 512 experts": lambda: comparison(**SMALL | {"layers": 94, "experts": 512}),
    "nothing at all": dict,
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n[:2] == "94" else []) for n in DOCUMENTS]
)
def test_every_kind_of_document(name: str) -> None:
    data = DOCUMENTS[name]()
    page = Page(render_page(data)).check()
    assert page.document == json.loads(json.dumps(data))
    sections = [a["id"] for a, _ in page.all("h2") if a["id"] in SECTIONS]
    linked = [a["href"][1:] for a, _ in page.all("a") if (a["href"] or "")[1:] in SECTIONS]
    assert set(sections) <= set(linked)
    assert {"sources", "reading"} <= set(sections)
    has = {
        "figures": name not in ("only steps", "one step", "nothing at all"),
        "steps": name in ("whole", "only steps", "one step"),
        "tails": name
        not in ("routing only", "only steps", "one step", "no rows", "nothing at all"),
        "outside": name in ("whole", "no rows", "one layer, one expert", "94 layers, 512 experts"),
    }
    assert {k: k in sections for k in has} == has


def test_the_figures_are_those_of_the_document() -> None:
    data = comparison(**SMALL)
    data["routing"]["native"]["cell_disagreement"] = 0.03775
    data["mismatch"]["native"]["metrics"]["kl_k3"] = 8.4e-5
    data["mismatch"]["replay"]["metrics"]["kl_k3"] = 2.1e-5
    data["mismatch"]["native"]["metrics"]["abs_logratio_max"] = None
    page = Page(render_page(data))
    rows = dict(zip(*[iter(_cells_of(page, "figures"))] * 2, strict=True))
    assert rows["Cells routed differently"] == ["3.77\u00a0%", "0\u00a0%", "−100\u00a0%"]
    assert rows["KL divergence (k3)"] == ["8.4e-05", "2.1e-05", "−75\u00a0%"]
    assert rows["|log-ratio|, largest"][0] == "–"
    assert rows["|log-ratio|, largest"][2] == "–"


def _cells_of(page: Page, css: str) -> Iterator[Any]:
    """Name and values of each body row of the table with this class."""
    body = page.html.split(f'<table class="{css}">')[1].split("<tbody>")[1].split("</tbody>")[0]
    for row in body.split("<tr")[1:]:
        name = re.search(r'class="term"[^>]*>([^<]*)<', row)
        assert name
        yield name[1]
        yield re.findall(r"<td[^>]*>([^<]*)</td>", row)


def test_each_headline_figure_has_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    charts_unwritten(monkeypatch)
    page = Page(render_page(comparison(**SMALL)))
    terms = page.all("a", **{"class": "term"})
    assert len(terms) == 9
    for attrs, _ in terms:
        tip = page.one("span", id=attrs["aria-describedby"] or "")
        assert tip in [text for _, text in page.all("dd")]


def test_the_map_has_the_shares_of_the_document() -> None:
    data = comparison(**SMALL)
    positions = data["routing"]["native"]["positions"]
    positions["cell_disagreement"][1][2] = None
    positions["cell_disagreement"][2][0] = 0.0
    html = render_page(data)
    body = html.split('id="heat"')[1].split("<tbody>")[1].split("</tbody>")[0]
    rows = [re.findall(r'<td class="h(.)">([^<]*)</td>', r) for r in body.split("<tr>")[1:]]
    assert [len(r) for r in rows] == [5, 5, 5]
    assert rows[2][1] == ("x", "")
    assert rows[0][2] == ("0", "0")
    for k, row in enumerate(rows):
        for j, (shade, text) in enumerate(row):
            value = positions["cell_disagreement"][j][k]
            if value:
                assert float(text) == pytest.approx(100 * value, rel=5e-3)
                assert 1 <= int(shade) <= 8


def test_shades_of_the_map_follow_its_legend() -> None:
    data = comparison(**SMALL)
    values = [0.0, 0.01, 0.02, 0.0201, 0.16]
    data["routing"]["native"]["positions"] = {
        "width": 1,
        "rows": [10] * 5,
        "cell_disagreement": [[v] for v in values],
    }
    data["routing"]["native"]["layers"] = data["routing"]["native"]["layers"][:1]
    page = Page(render_page(data))
    body = page.html.split('id="heat"')[1].split("</table>")[0]
    assert re.findall(r'<td class="h(.)">', body) == ["0", "1", "1", "2", "8"]
    legend = page.html.split('id="heat-legend"')[1].split("</ul>")[0]
    assert re.findall(r"</span>([^<]*)<", legend)[:3] == ["none", "0–2\u00a0%", "2–4\u00a0%"]
    assert "over 14\u00a0%" in legend


HOSTILE = (
    "</script><script>alert(1)</script><!-- \u2028 <b onclick=x>\"'&amp; \u202e \ud800 {{ 7*7 }}"
)


def _everywhere(value: Any) -> Any:
    """The document with hostile text in place of every text, numbers as they are."""
    if isinstance(value, dict):
        return {k: _everywhere(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_everywhere(v) for v in value]
    return HOSTILE if isinstance(value, str) else value


def test_text_of_the_document_is_never_markup() -> None:
    data = _everywhere(comparison(**SMALL, steps=4))
    data["files"]["a"]["provenance"] = {HOSTILE: [[HOSTILE, 1]], "second": HOSTILE}
    data["slices"] = {HOSTILE: data["slices"]["turn"]}
    data["alignment"] = HOSTILE
    data["environment"] = {HOSTILE: HOSTILE}
    data["mismatch"]["native"]["metrics"][HOSTILE] = 1.0
    for record in data["steps"]:
        record["metrics"] = {HOSTILE: 1.0}
    html = render_page(data)
    html.encode()  # half a surrogate pair could not be written
    page = Page(html).check()
    assert len(page.all("script")) == 2
    assert not page.all("b", onclick="x")
    assert "49" not in page.one("title")
    raw = html.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&\u2028") & set(raw)
    assert page.document["alignment"] == HOSTILE
    assert page.document["worst"]["rollouts"][0]["id"] == HOSTILE


def test_numbers_that_are_not_finite_are_null_in_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    charts_unwritten(monkeypatch)
    data = comparison(**SMALL)
    data["mismatch"]["native"]["metrics"] |= {"kl_k3": float("inf"), "ess": float("nan")}
    page = Page(render_page(data)).check()
    assert page.document["mismatch"]["native"]["metrics"]["kl_k3"] is None


WHOLE = comparison(**SMALL | {"rollouts": 2, "length": 12, "excerpt": 8}, steps=3)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    children: Any = value.items() if isinstance(value, dict) else ()
    children = enumerate(value) if isinstance(value, list) else children
    for key, child in children:
        yield from _paths(child, (*path, key))


PATHS = list(_paths(WHOLE))


def _without(paths: list[tuple[Any, ...]]) -> dict[str, Any]:
    """The whole document with null at these paths."""
    data = copy.deepcopy(WHOLE)
    for path in paths:
        at: Any = data
        for key in path[:-1]:
            at = at[key] if at is not None else None
        if at is not None:
            at[path[-1]] = None
    return data


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # one example takes long
)
@given(st.integers(0, 2**32), st.sampled_from([1, 5, 60, 400]))
def test_nulls_anywhere(seed: int, count: int) -> None:
    paths = random.Random(seed).sample(PATHS, min(count, len(PATHS)))
    with pytest.MonkeyPatch.context() as m:
        charts_unwritten(m)
        Page(render_page(_without(paths))).check()


@pytest.mark.parametrize("seed", range(3))
def test_charts_of_a_document_with_nulls(seed: int) -> None:
    Page(render_page(_without(random.Random(seed).sample(PATHS, 150)))).check()


def test_each_block_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    charts_unwritten(monkeypatch)
    nested = ("routing", "mismatch", "files")
    for path in PATHS:
        if len(path) == 1 or (len(path) == 2 and path[0] in nested):
            data = copy.deepcopy(WHOLE) | {"steps": WHOLE["steps"][:1]}
            block: Any = data if len(path) == 1 else data[path[0]]
            del block[path[-1]]
            Page(render_page(data)).check()


def test_differences_of_provenance_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    charts_unwritten(monkeypatch)
    html = render_page(comparison(**SMALL))
    rows = html.split('class="provenance"')[1].split("<tbody>")[1].split("</tbody>")[0]
    marked = [r for r in rows.split("<tr")[1:] if 'class="differs"' in r]
    assert [re.findall("<bdi>([^<]*)</bdi>", r)[0] for r in marked] == [
        "engine",
        "engine_version",
        "dtype",
    ]
    assert all("differs: " in r for r in marked)


def test_how_numbers_are_written() -> None:
    assert [number(x) for x in (4096, 0.0449, 2.9, 0.00084, 1234.5, 0, -1.3, 1e12)] == [
        "4,096",
        "0.0449",
        "2.90",
        "8.4e-04",
        "1,234",
        "0",
        "−1.30",
        "1.0e+12",
    ]
    assert [share(x).replace("\u00a0", " ") for x in (0.0378, 0, 1, 0.123, 2.5e-5, 1e-7)] == [
        "3.78 %",
        "0 %",
        "100 %",
        "12.3 %",
        "0.0025 %",
        "1.0e-05 %",
    ]
    nothing = [None, float("nan"), float("inf"), "text", True, [], 10**400]
    for write in (number, share, signed, tiny):
        assert [write(x) for x in nothing] == ["–"] * len(nothing)
    assert [tiny(x) for x in (8.4e-5, 0.0123, 0.5, 0)] == ["8.4e-05", "1.2e-02", "0.500", "0"]
    assert [signed(x) for x in (0.5, -0.5, 0)] == ["+0.500", "−0.500", "0"]
    assert [change(a, b) for a, b in ((2, 1), (0, 1), (None, 1), (1, 1.004), (1, 1))] == [
        "−50\u00a0%",
        "–",
        "–",
        "+0.4\u00a0%",
        "±0\u00a0%",
    ]
    assert [edge(x) for x in (0, 1e-4, 2.5e-3, 0.01, 0.99, None)] == [
        "0",
        "1e-4",
        "2.5e-3",
        "0.01",
        "0.99",
        "?",
    ]
    assert visible("a\n\tb\x00\x7f") == "a⏎⇥b␀\ufffd"


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "jinja2"):
        with monkeypatch.context() as m:
            m.setitem(sys.modules, module, None)
            with pytest.raises(MissingDependencyError, match=rf"needs {module}.*\[report\]"):
                render_page({})


def test_the_same_document_gives_the_same_page() -> None:
    data = comparison(**SMALL, steps=4)
    assert render_page(data) == render_page(copy.deepcopy(data))


# --- colours


def _variables(theme: int) -> dict[str, tuple[float, float, float]]:
    """Colours of page.css in the light (0) or dark (1) theme, linear RGB."""
    css = files("r3.page").joinpath("page.css").read_text(encoding="utf-8")
    pairs = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", css)
    return {name: _linear((light, dark)[theme]) for name, light, dark in pairs}


def _linear(color: str) -> tuple[float, float, float]:
    r, g, b = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (r, g, b))  # type: ignore[return-value]


def _luminance(color: tuple[float, float, float]) -> float:
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), color, strict=True))


def _contrast(a: tuple[float, float, float], b: tuple[float, float, float]) -> float:
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(theme: int) -> None:
    colors = _variables(theme)
    pairs = [
        (text, "bg")
        for text in ("ink", "muted", "native", "replay", "extra", "good", "notice", "bad")
    ]
    pairs += [("ink", f"t{k}") for k in range(6)] + [("ink", "mark"), ("bg", "ink")]
    found = {pair: _contrast(colors[pair[0]], colors[pair[1]]) for pair in pairs}
    assert min(found.values()) >= 4.5, {k: v for k, v in found.items() if v < 4.5}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("scale", ["n", "r", "t"])
def test_scales_can_be_read_without_hue(theme: int, scale: str) -> None:
    """Each step is darker (lighter in the dark theme) than the last, also for the colour-blind:
    luminance alone carries the order."""
    colors = _variables(theme)
    steps = [_luminance(colors[f"{scale}{k}"]) for k in range(6 if scale == "t" else 9)]
    assert steps == sorted(steps, reverse=theme == 0)
    ratios = [
        _contrast(colors[f"{scale}{k}"], colors[f"{scale}{k + 1}"]) for k in range(len(steps) - 1)
    ]
    assert min(ratios) > 1.06, ratios
