"""What figures are taken to mean: each finding where it is called for, and nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from r3.verdict import judge

GOOD_METRICS = {
    **{"tokens": 1000, "sequences": 10, "kl_k3": 1e-4, "extreme_2": 0.0, "abs_logratio_max": 0.3},
    **{"ess": 0.99, "ess_sequence": 0.9},
}
ROUTING = {
    **{"rows": 1000, "rows_left_out": 0, "cell_disagreement": 0.03, "token_disagreement": 0.1},
    "layers": [{"layer": 3, "cell_disagreement": 0.03}, {"layer": 5, "cell_disagreement": 0.0}],
}
SAME = ROUTING | {
    **{"cell_disagreement": 0.0, "token_disagreement": 0.0},
    "layers": [{"layer": 3, "cell_disagreement": 0.0}, {"layer": 5, "cell_disagreement": 0.0}],
}


def mismatch(**changes: Any) -> dict[str, Any]:
    return {"metrics": GOOD_METRICS | changes, "left_out": {}, "examples": []}


def file(name: str) -> dict[str, Any]:
    return {"name": f"{name}.r3", "rollouts": 10, "with_logprobs": 10, "provenance": {}}


def healthy() -> dict[str, Any]:
    return {
        "files": {side: file(side) for side in "abc"},
        "pairs": {"rollouts": 10, "only_a": 0, "only_b": 0},
        "routing": {"native": ROUTING, "replay": SAME},
        "mismatch": {"native": mismatch(extreme_2=0.5), "replay": mismatch()},
        "attribution": {
            "token_share_differing": 0.1,
            "kl_share_differing": 0.6,
            "kl_removed_by_replay": 0.8,
        },
        "alignment": None,
    }


def findings(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    verdict = judge(document)
    levels = ["bad", "notice", "good"]
    order = [levels.index(f["level"]) for f in verdict["findings"]]
    assert order == sorted(order)
    assert verdict["level"] == verdict["findings"][0]["level"]
    assert all(f["look_at"] for f in verdict["findings"] if f["level"] == "bad")
    return {f["title"]: f for f in verdict["findings"]}


def without_replay(document: dict[str, Any]) -> dict[str, Any]:
    document["routing"]["replay"] = document["mismatch"]["replay"] = None
    document["attribution"]["kl_removed_by_replay"] = None
    document["mismatch"]["native"] = mismatch()
    return document


def test_a_healthy_run_with_replay():
    """What is bad without replay does not count where there is replay."""
    found = findings(healthy())
    assert list(found) == [
        "Replay works",
        "Routing is the main part of the mismatch, and replay removes it",
        "The tails are short",
    ]
    assert judge(healthy())["level"] == "good"
    assert "2,000 cells" in found["Replay works"]["text"]
    assert "replay removes 80 % of the KL" in list(found.values())[1]["text"]


@pytest.mark.parametrize(
    ("change", "title", "level", "words"),
    [
        (
            lambda d: d["attribution"].update(kl_removed_by_replay=0.2),
            "Routing is not the main part of the mismatch",
            "notice",
            "replay removes 20 % of the KL",
        ),
        (
            lambda d: d["routing"].update(replay=ROUTING),
            "Replay did not take effect everywhere",
            "bad",
            "in layers 3",
        ),
        (
            lambda d: d["routing"].update(native=SAME),
            "Routing is not the problem",
            "good",
            "same experts in all cells",
        ),
        (
            lambda d: d.update(alignment={"fault": "row shift", "text": "rows are shifted"}),
            "The recorded rows do not stand where they belong",
            "bad",
            "rows are shifted",
        ),
        (
            lambda d: d["mismatch"].update(replay=mismatch(extreme_2=0.02)),
            "So many extreme tokens have come before a collapse",
            "bad",
            "2 % of 1,000",
        ),
        (
            lambda d: d["mismatch"].update(replay=mismatch(extreme_2=0.002)),
            "Some tokens are far off",
            "notice",
            "0.2 % of 1,000",
        ),
        (
            lambda d: d["mismatch"].update(replay=mismatch(abs_logratio_max=11.0)),
            "Some tokens are far off",
            "notice",
            "largest |log-ratio| 11",
        ),
        (
            lambda d: d["mismatch"].update(replay=mismatch(ess_sequence=0.3)),
            "Few tokens or sequences carry most of the weight",
            "notice",
            "0.30 over sequences",
        ),
        (
            lambda d: d["mismatch"]["replay"].update(
                left_out={"trainer_nan": 3, "sampler_inf": 0}, examples=["rollout 1: token 2"]
            ),
            "Log-probabilities that cannot be",
            "notice",
            "Left out, replay: 3 trainer nan",
        ),
        (
            lambda d: d["files"]["a"]["provenance"].update(
                logprobs_mode=[["processed_logprobs", 9], ["raw_logprobs", 1]]
            ),
            "The engine reported other log-probabilities than it sampled from",
            "notice",
            "is raw_logprobs",
        ),
        (
            lambda d: d["routing"].update(native=ROUTING | {"rows_left_out": 100}),
            "Rows without a route",
            "notice",
            "100 rows (9.09 %)",
        ),
        (
            lambda d: d["routing"].update(native=ROUTING | {"rows": 0, "rows_left_out": 100}),
            "Rows without a route",
            "bad",
            "100 rows (100 %)",
        ),
        (
            lambda d: d["files"]["b"].update(with_logprobs=7),
            "Rollouts without log-probabilities",
            "notice",
            "3 of b.r3",
        ),
        (
            lambda d: d["routing"].update(native=ROUTING | {"rows": 0}),
            "No routing could be compared",
            "notice",
            "no rollout has a row",
        ),
        (
            lambda d: d["pairs"].update(only_a=2, only_b=1),
            "Rollouts without a counterpart",
            "notice",
            "2 only in the first file",
        ),
    ],
)
def test_each_finding(change, title, level, words):
    document = copy.deepcopy(healthy())
    assert title not in findings(document)
    change(document)
    found = findings(document)
    assert found[title]["level"] == level
    assert words in found[title]["text"]


def test_one_sequence_has_no_sequence_level():
    document = healthy()
    document["mismatch"]["replay"] = mismatch(ess_sequence=0.3, sequences=1)
    assert "Few tokens or sequences carry most of the weight" not in findings(document)


@pytest.mark.parametrize(
    ("shares", "title"),
    [
        ({}, "Routing is likely the main part of a small mismatch"),
        ({"kl_share_differing": 0.2}, "Most of the mismatch sits in tokens that are routed alike"),
        (
            {"token_share_differing": 0.94, "kl_share_differing": 0.97},
            "Whether routing is the problem only replay can tell",
        ),
        ({"kl_share_differing": None}, "Engine and trainer route differently"),
    ],
)
def test_the_cause_without_replay(shares, title):
    document = without_replay(copy.deepcopy(healthy()))
    document["attribution"].update(shares)
    assert findings(document)[title]["level"] == "notice"


def test_without_log_probabilities_only_routing_is_judged():
    document = without_replay(copy.deepcopy(healthy()))
    document["mismatch"]["native"] = document["attribution"] = None
    assert list(findings(document)) == ["Engine and trainer route differently"]


def test_without_anything_there_is_no_praise():
    nothing = {"native": None, "replay": None}
    document = {"files": {}, "pairs": None, "routing": nothing, "mismatch": nothing}
    assert judge(document) == {"level": "notice", "findings": []}


def test_a_large_mismatch_is_not_called_small():
    document = without_replay(copy.deepcopy(healthy()))
    document["mismatch"]["native"] = mismatch(kl_k3=0.002)
    assert "Routing is likely the main part of the mismatch" in findings(document)


def test_what_is_misplaced_silences_all_else():
    document = healthy()
    document["logprob_shift"] = {"shift": -1, "correlation": 0.99, "correlation_at_0": 0.02}
    document["pairs"]["only_b"] = 4
    found = findings(document)
    assert list(found) == ["The log-probabilities are shifted", "Rollouts without a counterpart"]
    text = found["The log-probabilities are shifted"]["text"]
    assert "the token before (0.99)" in text
    assert "4 only in the second" in found["Rollouts without a counterpart"]["text"]


def test_alerts_of_recorded_steps_are_findings():
    """One for each kind; bad only if the last step has it."""

    def alert(name: str, message: str = "") -> dict[str, Any]:
        return {"name": name, "level": "bad", "message": message, "look_at": "resync"}

    steps = [
        {"step": 7, "alerts": [alert("wrong_token", "it is 39")]},
        {"step": 8, "alerts": [alert("ess_token", "it is 0.2")]},
        {"step": 9, "alerts": [alert("ess_token", "it is 0.1")]},
    ]
    found = findings(healthy() | {"steps": steps})
    assert found["Alert of recorded steps: ess token"] == {
        "level": "bad",
        "title": "Alert of recorded steps: ess token",
        "text": "In 2 of 3 steps, last in step 9: it is 0.1",
        "look_at": "resync",
    }
    assert found["Alert of recorded steps: wrong token"]["level"] == "notice"
    assert "step 7: it is 39" in found["Alert of recorded steps: wrong token"]["text"]
