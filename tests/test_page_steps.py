"""The page of a run's steps, and what a page leaves out that has nothing to show for it."""

# ruff: noqa: RUF001 (dashes of the page)

from __future__ import annotations

import re
from typing import Any

import pytest

from page_data import SMALL, comparison, only_steps
from r3.page import render_page
from r3.page.glossary import _SHOWN, meaning
from r3.page.words import METRICS, TERMS
from r3.step_figures import NAMES

pytestmark = pytest.mark.slow  # a page takes a second to write
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are tried elsewhere, and take most of the time."""
    monkeypatch.setattr("r3.page.charts.write_svg", lambda *_: "<svg></svg>")


def _sections(html: str) -> dict[str, str]:
    """Markup of each section by the id of its heading, in order."""
    main = html.split("<main")[1].split("</main>")[0]
    parts = re.split(r'<section [^>]*aria-labelledby="([\w-]+)">', main)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _table(html: str, caption: str) -> list[list[str]]:
    """Text of the cells of the table with this caption, its head first."""
    found = re.search(rf"<caption[^>]*>{re.escape(caption)}</caption>(.*?)</table>", html, re.S)
    assert found, caption
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", found[1], re.S)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", r, re.S) for r in rows]
    return [[re.sub("<[^>]*>", "", c).strip() for c in row] for row in cells]


def _alert(name: str, level: str, value: float) -> dict[str, Any]:
    text = f"{name} is {value}"
    return {"name": name, "level": level, "value": value, "limit": 1e-3, "message": text} | {
        "figure": f"routing/{name}",
        "look_at": f"what {name} says",
    }


def test_an_alert_of_steps_in_a_row_is_one_row() -> None:
    data = only_steps(8)
    for r, step in zip(data["steps"], (0, 10, 20, 30, 40, 50, 60, 70), strict=True):
        # of recorded steps, whatever lies between
        r |= {"step": step, "alerts": []}
    for k in (1, 2, 3, 6):
        data["steps"][k]["alerts"].append(_alert("kl", "notice", 0.002 + k))
    data["steps"][4]["alerts"].append(_alert("kl", "bad", 0.5))
    data["steps"][2]["alerts"].insert(0, _alert("ess", "bad", 0.25))
    head, *rows = _table(render_page(data), "Alerts")
    assert head[:4] == ["steps", "level", "alert", "value, first"]
    assert rows == [
        ["10 to 30 (3)", "notice", "kl", "1.00", "3.00", "0.00100", "kl is 3.002", "what kl says"],
        ["20", "bad", "ess", "0.250", "0.250", "0.00100", "ess is 0.25", "what ess says"],
        ["40", "bad", "kl", "0.500", "0.500", "0.00100", "kl is 0.5", "what kl says"],
        ["60", "notice", "kl", "6.00", "6.00", "0.00100", "kl is 6.002", "what kl says"],
    ]


def test_alerts_of_the_document_go_before_those_of_its_steps() -> None:
    data = only_steps(30)
    assert len(_table(render_page(data), "Alerts")) == 4
    data["alerts"] = [{"name": "kl", "level": "notice", "value": 0.002, "limit": 1e-3}]
    assert [r[0] for r in _table(render_page(data), "Alerts")] == ["steps", "–"]
    data["alerts"] = [{"name": "kl", "level": "notice", "step": s} for s in (3, 4, 900)]
    assert [r[0] for r in _table(render_page(data), "Alerts")] == ["steps", "3 to 4 (2)", "900"]


def test_steps_come_first_only_where_there_is_a_trend() -> None:
    many, one = (list(_sections(render_page(comparison(**SMALL, steps=n)))) for n in (4, 1))
    assert many[:3] == ["verdict", "figures", "steps"]
    assert one[one.index("steps") - 1 : one.index("steps") + 2] == ["tokens", "steps", "slices"]
    page = render_page(comparison(**SMALL, steps=1))
    links = re.findall(r'<li><a href="#([\w-]+)">', page.split("<nav")[1].split("</nav>")[0])
    assert links == one[1:]
    assert ["metric", "value", "what it is"] in _table(page, "Every recorded metric")


def test_slices_of_the_last_step_where_the_comparison_has_none() -> None:
    data = only_steps(4)
    html = render_page(data)
    section = _sections(html)["slices"]
    assert ">Slices of the last step</h2>" in section
    assert "Of step 3." in section
    assert section.count("<table") == 2
    head, *rows = _table(section, "By turn")
    assert head == [
        *("turn", "rows", "cells differ", "tokens differ", "sampled tokens"),
        *("KL k3", "|lr| p99", "F(2)", "ESS"),
    ]
    kl = data["steps"][3]["slices"]["turn"]["0"]["kl_k3"]
    assert rows[0][:2] == ["0", "3,040"]
    assert float(rows[0][5]) == pytest.approx(kl, rel=0.05)
    assert rows[1] == ["1", "40", "6.25\u00a0%", "40.0\u00a0%", "0", *"––––"]
    data["steps"][3]["slices"] = {}
    assert "slices" not in _sections(render_page(data))
    both = comparison(**SMALL, steps=4)
    section = _sections(render_page(both))["slices"]
    assert ">Slices</h2>" in section
    assert "Of step" not in section
    assert _table(section, "By turn")[0][5] == "KL k3, native"


def test_segments_say_where_the_first_answer_token_counts() -> None:
    section = _sections(render_page(comparison(**SMALL)))["slices"]
    assert section.count("first token of an answer counts under prompt") == 1
    assert section.index("By segment") < section.index("first token of an answer")
    assert section.index("first token of an answer") < section.index("By turn")


def test_the_glossary_holds_what_the_page_shows() -> None:
    def terms(data: dict[str, Any]) -> set[str]:
        return set(re.findall(r'<dt id="term-(\w+)"', render_page(data)))

    steps = terms(only_steps())
    assert steps >= {"kl_k3", "extreme_2", "ess", "ess_sequence", "abs_logratio_p999", "weight_lag"}
    assert not steps & {"margin", "top1_changed", "max_vio", "probs_pearson"}
    routing = terms(comparison(**SMALL, logprobs=False, margins=False, outside=False))
    assert routing >= {"cell_disagreement", "max_vio", "top1_changed"}
    assert not routing & {"kl_k3", "ess", "logratio", "margin", "outside_topk"}
    assert terms({}) == set()
    assert set(_SHOWN) == set(TERMS)


def test_every_recorded_figure_says_what_it_is() -> None:
    assert not [name for name in NAMES.values() if not meaning(name)]
    assert meaning("routing/ess") == TERMS["ess"][0]
    assert meaning("rollout_corr/kl") == METRICS["kl_k1"]
    assert meaning("somebody's own") is None
    rows = _table(render_page(only_steps(3)), "Every recorded metric")
    assert rows[1][0] == "routing/tokens"
    assert rows[1][-1] == METRICS["tokens"]


def test_how_to_read_fits_the_page() -> None:
    def reading(data: dict[str, Any]) -> str:
        return _sections(render_page(data))["reading"]

    steps = reading(only_steps())
    assert "worst tokens" not in steps
    assert "native with replay" not in steps
    assert "trends of the tails" in steps
    assert "slices then say" in steps
    whole = reading(comparison(**SMALL, steps=3))
    assert "Compare native with replay first" in whole
    assert "worst tokens" in whole
    assert "trends of the tails" in whole
    bare = reading(comparison(**SMALL, replay=False, logprobs=False))
    assert "Compare native with replay" not in bare
    assert "worst tokens" not in bare
    assert "trends" not in bare


def test_without_replay_there_are_no_empty_columns() -> None:
    html = render_page(comparison(**SMALL, replay=False))
    sections = _sections(html)
    assert ">Headline figures</h2>" in sections["figures"]
    table = _table(sections["figures"], "Headline figures")
    assert table[0] == ["figure", "native"]
    assert {len(row) for row in table} == {2}
    assert "lr replay" not in sections["tokens"]
    assert {len(row) for row in _table(sections["tokens"], "Worst tokens")} == {8}
    html = render_page(comparison(**SMALL))
    assert ">Native against replay</h2>" in html
    assert {len(r) for r in _table(html, "Headline figures, native and replay")} == {4}
    assert _table(html, "Worst tokens")[0][3:7] == [
        *("p engine", "p trainer, native", "lr native", "lr replay"),
    ]


def test_rollouts_stand_by_their_part_of_the_kl() -> None:
    data = comparison(**SMALL)
    rollouts = data["worst"]["rollouts"]
    data["mismatch"]["native"]["metrics"] |= {"kl_k3": 0.002, "tokens": 1000}
    for r, kl, tokens in zip(rollouts, (0.01, 0.04, None, 0.03), (100, 10, 50, 30), strict=True):
        r |= {"kl_k3_native": kl, "sampled_tokens": tokens}
    section = _sections(render_page(data))["rollouts"]
    rows = [r for r in _table(section, "Worst rollouts")[1:] if len(r) > 1]
    assert [r[:2] for r in rows] == [
        [rollouts[0]["id"], "50.0\u00a0%"],  # the mean is smallest, the part is not
        [rollouts[3]["id"], "45.0\u00a0%"],
        [rollouts[1]["id"], "20.0\u00a0%"],
        [rollouts[2]["id"], "–"],
    ]
    # what the script opens is the same rollout
    assert re.findall(r'data-rollout="(\d)"', section) == ["0", "3", "1", "2"]
    data["mismatch"]["native"]["metrics"]["kl_k3"] = None
    section = _sections(render_page(data))["rollouts"]
    assert "part of KL" not in section
    assert re.findall(r'data-rollout="(\d)"', section) == ["0", "1", "2", "3"]
    assert "By their part of the whole KL" in section


def test_why_replay_removes_more_than_differing_tokens_carry() -> None:
    data = comparison(**SMALL)
    data["attribution"] |= {"kl_share_differing": 0.57, "kl_removed_by_replay": 0.85}
    section = _sections(render_page(data))["attribution"]
    assert "they carry 57.0\u00a0% of the KL. Replay removes 85.0\u00a0% of the KL." in section
    assert "attention carries on what differed in earlier rows" in section
    for removed in (0.5, None):
        data["attribution"]["kl_removed_by_replay"] = removed
        assert "attention" not in _sections(render_page(data))["attribution"]


def test_a_verdict_without_findings() -> None:
    data = only_steps(30)
    data["verdict"] = {"level": "notice", "findings": []}
    count = sum(len(r["alerts"]) for r in data["steps"])
    verdict = _sections(render_page(data))["verdict"]
    assert f'No finding. {count} alerts in the <a href="#steps">recorded steps</a>.' in verdict
    assert "Nothing to report" not in verdict
    for r in data["steps"]:
        r["alerts"] = []
    verdict = _sections(render_page(data))["verdict"]
    assert "<p>No finding.</p>" in verdict
    data["verdict"] = None
    assert "holds no verdict" in _sections(render_page(data))["verdict"]
