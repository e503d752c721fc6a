"""Each alert on a history made for it, and silence on a run that is well."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.alerts import LOOK_AT, Alert, AlertLimits, find_alerts
from r3.monitor import NAMES

CORRELATION = "training/rollout_actor_probs_pearson_corr"
USUAL = {  # of a run with replay, by recorded name, and the size of its noise (of the logarithm)
    "routing/extreme_2": (3e-5, 0.4),
    "routing/abs_logratio_p999": (0.12, 0.2),
    "routing/abs_logratio_max": (1.5, 0.3),
    "rollout_corr/k3_kl": (6e-4, 0.1),
    "routing/ess": (0.97, 0.005),
    "routing/ess_sequence": (0.8, 0.05),
    CORRELATION: (0.998, 0.0005),
    "routing/cell_disagreement_free": (0.1, 0.05),
    "routing/outside_topk_experts_forced": (0.015, 0.05),
    "routing/rows_without_route_fraction": (1e-3, 0.5),
    "routing/weight_lag_mean": (1.5, 0.1),
}


def healthy(steps: int, seed: int = 0) -> list[dict[str, float]]:
    rng = random.Random(seed)
    fixed = {
        "routing/tokens": 1000,
        "routing/left_out": 0,
        "routing/rollouts_without_route": 0,
        "routing/cells_replayed": 1000,
        "routing/cells_not_enclosed": 0,
    }
    return [
        {name: x * math.exp(rng.gauss(0, noise)) for name, (x, noise) in USUAL.items()} | fixed
        for _ in range(steps)
    ]


def alerts_of(past: list[dict], metrics: dict, **record: object) -> list[Alert]:
    return find_alerts(past, {"metrics": metrics, **record})


def names_of(*args: object, **record: object) -> list[str]:
    return [alert.name for alert in alerts_of(*args, **record)]


def test_the_figures_are_recorded_under_these_names():
    assert set(USUAL) <= set(NAMES.values())
    assert all(name in NAMES.values() for name in healthy(1)[0])


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_is_silent(seed):
    run = healthy(200, seed)
    for i, metrics in enumerate(run):
        assert alerts_of(run[:i], metrics) == []


@pytest.mark.parametrize("history", [0, 30])
@pytest.mark.parametrize(
    ("name", "figure", "value", "level", "limit"),
    [
        ("extreme_tokens", "routing/extreme_2", 2e-3, "notice", 1e-3),
        ("extreme_tokens", "routing/extreme_2", 0.02, "bad", 1e-2),
        ("wrong_token", "routing/abs_logratio_max", 10.5, "bad", 10),
        ("kl", "rollout_corr/k3_kl", 1.5e-3, "notice", 1e-3),
        ("kl", "rollout_corr/k3_kl", 0.013, "bad", 1e-2),
        ("kl", "rollout_corr/k3_kl", math.inf, "bad", 1e-2),
        ("ess_token", "routing/ess", 0.49, "bad", 0.5),
        ("ess_sequence", "routing/ess_sequence", 0.0, "notice", 0.5),
        ("uncorrelated", CORRELATION, 0.3, "bad", 0.9),
        ("rows_without_route", "routing/rows_without_route_fraction", 0.011, "notice", 0.01),
        ("left_out", "routing/left_out", 1, "notice", 0),
        ("rollout_without_route", "routing/rollouts_without_route", 2, "bad", 0),
        ("no_tokens", "routing/tokens", 0, "bad", None),
        ("not_enclosed", "routing/cells_not_enclosed", 3, "notice", 0),
    ],
)
def test_beyond_a_limit(name, figure, value, level, limit, history):
    *past, now = healthy(history + 1)
    (alert,) = alerts_of(past, {**now, figure: value})
    assert (alert.name, alert.level, alert.limit) == (name, level, limit)
    assert alert.value == pytest.approx(value, rel=1e-2)
    assert alert.look_at == LOOK_AT[name]
    assert alert.to_dict()["message"]


def test_rows_outside_the_own_top_k():
    *past, now = healthy(31)
    metrics = {**now, "routing/outside_topk_experts_forced": 0.2}
    assert names_of([], metrics) == ["outside_topk"]
    found = alerts_of(past, metrics)
    assert [a.name for a in found] == ["outside_topk", "outside_topk_jump"]
    assert "native.alignment()" in found[0].look_at


@pytest.mark.parametrize(
    ("name", "figure", "value"),
    [
        ("disagreement_jump", "routing/cell_disagreement_free", 0.17),
        ("outside_topk_jump", "routing/outside_topk_experts_forced", 0.025),
    ],
)
def test_a_jump_against_its_own_median(name, figure, value):
    *past, now = healthy(31)
    metrics = {**now, figure: value}
    (alert,) = alerts_of(past, metrics)
    before = sorted(m[figure] for m in past[-20:])
    assert (alert.name, alert.level, alert.value) == (name, "bad", value)
    assert alert.limit == pytest.approx(1.5 * (before[9] + before[10]) / 2)
    assert alerts_of(past[-9:], metrics) == []  # too few steps to call one usual
    assert names_of(past[-10:], metrics) == [name]
    zeros = [{**m, figure: 0.0} for m in past]
    assert alerts_of(zeros, {**metrics, figure: 0.009}) == []
    (alert,) = alerts_of(zeros, {**metrics, figure: 0.012})
    assert (alert.name, alert.limit) == (name, 0.01)


@pytest.mark.parametrize(
    ("name", "figure", "level", "factor"),
    [
        ("extreme_tokens_rising", "routing/extreme_2", "bad", 10),
        ("tail_rising", "routing/abs_logratio_p999", "notice", 4),
        ("weight_lag_rising", "routing/weight_lag_mean", "notice", 2),
    ],
)
def test_a_trend(name, figure, level, factor):
    run = healthy(60)
    for metrics in run[40:]:
        metrics[figure] *= factor
    fired = [i for i, metrics in enumerate(run) if alerts_of(run[:i], metrics)]
    # when 3 of the last 5 are high, and until half of the steps before are
    assert fired[0] == 42
    assert set(range(42, 53)) <= set(fired)
    assert fired[-1] < 58
    (alert,) = alerts_of(run[:45], run[45])
    assert (alert.name, alert.level) == (name, level)
    assert alert.value > alert.limit
    for i in range(42, 53):  # not before there are 25 steps, this one included
        assert alerts_of(run[i - 23 : i], run[i]) == []
        assert names_of(run[i - 24 : i], run[i]) == [name]
    run[45][figure] = math.nan
    assert alerts_of(run[:45], run[45]) == []
    one = healthy(60)
    one[59][figure] *= factor
    assert alerts_of(one[:59], one[59]) == []


def test_a_tail_that_rises_from_nothing_to_little_is_no_trend():
    run = [{"routing/extreme_2": 0.0}] * 25 + [{"routing/extreme_2": 9e-5}] * 5
    assert alerts_of(run[:-1], run[-1]) == []
    run = [{"routing/extreme_2": 0.0}] * 25 + [{"routing/extreme_2": 2e-4}] * 5
    assert names_of(run[:-1], run[-1]) == ["extreme_tokens_rising"]


def test_other_alerts():
    changes = {"engine.dtype": ["bfloat16", "float8"]}
    (alert,) = alerts_of([], {}, changes=changes)
    assert (alert.name, alert.level, alert.value) == ("environment", "notice", None)
    assert alert.message == "changed: engine.dtype: 'bfloat16' -> 'float8'"
    alignment = {"fault": "row shift", "text": "rows are shifted by one"}
    (alert,) = alerts_of([], {}, alignment=alignment)
    assert (alert.name, alert.level) == ("alignment", "bad")
    assert alert.message == "rows are shifted by one"
    assert alerts_of([], {}, alignment={"fault": None, "text": ""}, changes={}) == []
    metrics = {"routing/rollouts_without_route": 2}
    (alert,) = alerts_of([], metrics, rollouts_without_route=["a/0/0/0/0", "a/0/1/0/0"])
    assert alert.message == "2 rollouts without any routing: a/0/0/0/0, a/0/1/0/0"
    # where nothing is replayed, nothing needs to be enclosed
    assert alerts_of([], {"routing/cells_not_enclosed": 3, "routing/cells_replayed": 0}) == []


def test_bad_ones_come_first():
    metrics = {"routing/left_out": 1, "routing/ess": 0.1, "rollout_corr/k3_kl": 1.0}
    found = alerts_of([], metrics, changes={"engine.dtype": [1, 2]})
    assert [a.level for a in found] == ["bad", "bad", "notice", "notice"]


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_nothing_known_is_nothing_wrong(nothing):
    unknown = dict.fromkeys(NAMES.values(), nothing)
    for past in ([], [unknown] * 30, healthy(30)):
        assert alerts_of(past, unknown) == []
        assert alerts_of(past, {}) == []
    assert alerts_of([unknown, {}] * 15, healthy(1)[0]) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_beyond_float64(sign):
    *past, now = healthy(31)
    size = sign * 10**400
    names = [name for name, value in now.items() if isinstance(value, float)]
    for name in names:
        found = alerts_of([{**m, name: size} for m in past], {**now, name: size})
        assert all(a.value == sign * math.inf for a in found)
    assert names_of(past, {**now, "rollout_corr/k3_kl": 10**400}) == ["kl"]
    assert names_of(past, {**now, "routing/ess": -(10**400)}) == ["ess_token"]


def test_limits_are_the_users():
    *past, now = healthy(31)
    for metrics in past:
        metrics["routing/cell_disagreement_free"] = 0.1
    now |= {"rollout_corr/k3_kl": 0.02, "routing/cell_disagreement_free": 0.19}
    assert names_of(past, now) == ["kl", "disagreement_jump"]
    limits = AlertLimits(kl=0.1, kl_bad=0.2, jump=2)
    assert find_alerts(past, {"metrics": now}, limits) == []
    assert AlertLimits(recent=2, before=4).steps == 6


@pytest.mark.slow
@given(st.randoms(use_true_random=False), st.integers(0, 40))
def test_the_order_of_keys_does_not_matter(rng, steps):
    run = healthy(steps + 1, seed=3)
    for metrics in run[steps // 2 :]:
        for name in metrics:
            metrics[name] *= rng.choice([1, 1, 1, 5, 0.3])
    changes = {"b": [1, 2], "a": [3, 4]}
    shuffled = [dict(rng.sample(list(m.items()), len(m))) for m in run]
    assert alerts_of(run[:-1], run[-1], changes=changes) == alerts_of(
        shuffled[:-1], shuffled[-1], changes=dict(reversed(changes.items()))
    )


def test_every_alert_and_limit_is_documented():
    text = (Path(__file__).parent.parent / "docs" / "monitoring.md").read_text()
    table = text.split("<!-- alerts -->")[1]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    assert [(row[1].strip(" `"), row[-2].strip()) for row in rows] == list(LOOK_AT.items())
    for field in dataclasses.fields(AlertLimits):
        assert re.search(rf"^ +.*\b{field.name}\b.*:", AlertLimits.__doc__, re.MULTILINE)
        assert f"`{field.name}` ({field.default:g})" in table, field.name
