"""Comparisons of traces against going through every token and cell in plain Python."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import r3.comparison
from comparison_tools import SPEC, draw_rollout
from r3 import RolloutId, RouterSpec, RoutingTrace, TraceError
from r3.comparison import Comparison

Rollout = list[RoutingTrace]


def draw(seed: int, rollouts: int, **kwargs: Any) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    return [draw_rollout(rng, i, **kwargs) for i in range(rollouts)]


def compare(rollouts: list[Rollout]) -> dict[str, Any]:
    comparison = Comparison(SPEC)
    for traces in rollouts:
        comparison.add(*traces)
    return comparison.to_dict()


def differing_layers(a: RoutingTrace, b: RoutingTrace, row: int) -> int | None:
    """None where there is no row on one side"""
    if row >= a.num_rows or not (a.valid[row] and b.valid[row]):
        return None
    pairs = zip(a.routed_experts[row], b.routed_experts[row], strict=True)
    return sum(set(map(int, x)) != set(map(int, y)) for x, y in pairs)


def tokens_of(rollouts: list[Rollout]) -> list[dict[str, Any]]:
    """Each sampled token with all that is known of it."""
    found = []
    for a, b, c in rollouts:
        for i in range(a.num_tokens):
            if math.isnan(a.logprobs[i]):
                continue
            native = float(b.logprobs[i]) - float(a.logprobs[i])
            replay = float(c.logprobs[i]) - float(a.logprobs[i])
            found.append(
                {
                    "rollout": str(a.rollout_id),
                    "position": i,
                    "native": native,
                    "replay": replay,
                    "layers": differing_layers(a, b, i - 1) if i else None,
                    "fed": int(a.segments[i - 1]) if i else None,
                    "turn": int(a.columns["turns"].data[i]),
                    "length": a.num_tokens,
                    "tags": a.tags,
                    "lag": 9 - int(a.weight_versions[i - 1])
                    if i and a.valid[i - 1] and b.valid[i - 1]
                    else None,
                }
            )
    return found


def k3(x: float) -> float:
    return math.expm1(x) - x


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


@pytest.fixture(params=[None, 100], ids=["at once", "in parts"])
def in_parts(request, monkeypatch):
    """How many tokens are counted together must not matter."""
    if request.param:
        monkeypatch.setattr(r3.comparison, "_TOKENS", request.param)


@pytest.mark.usefixtures("in_parts")
def test_figures_equal_those_counted_one_by_one():
    rollouts = draw(0, 40)
    found = compare(rollouts)
    rows = [
        n for a, b, _ in rollouts for t in range(a.num_rows)
        if (n := differing_layers(a, b, t)) is not None
    ]  # fmt: skip
    routing = found["routing"]["native"]
    assert routing["rows"] == len(rows)
    assert routing["rows_left_out"] == sum(a.num_rows for a, _, _ in rollouts) - len(rows) > 0
    assert routing["cell_disagreement"] == pytest.approx(sum(rows) / (3 * len(rows)))
    assert routing["layers_per_token"] == [rows.count(i) for i in range(4)]
    assert sum(routing["margins"]["cells"]) == 3 * len(rows)
    assert sum(routing["margins"]["differing"]) == sum(rows)
    assert found["routing"]["replay"]["cell_disagreement"] == 0
    tokens = tokens_of(rollouts)
    for side in ("native", "replay"):
        metrics = found["mismatch"][side]["metrics"]
        assert metrics["tokens"] == len(tokens)
        assert metrics["sequences"] == len({t["rollout"] for t in tokens})
        assert metrics["kl_k3"] == pytest.approx(mean([k3(t[side]) for t in tokens]), rel=1e-12)
        far = [abs(t[side]) for t in tokens]
        assert metrics["abs_logratio_max"] == max(far)
        survival = found["mismatch"][side]["survival"]
        for x, share in zip(survival["thresholds"], survival["share"], strict=True):
            assert share == pytest.approx(mean([y > x for y in far]))


@pytest.mark.usefixtures("in_parts")
def test_attribution_is_of_the_pass_that_produced_the_token():
    rollouts = draw(1, 40)
    found = compare(rollouts)["attribution"]
    tokens = [t for t in tokens_of(rollouts) if t["layers"] is not None]
    total = math.fsum(k3(t["native"]) for t in tokens)
    groups = {"0": [0], "1": [1], "2": [2], "3": [3]}
    assert [g["layers"] for g in found["by_layers"]] == list(groups)
    for group in found["by_layers"]:
        inside = [t for t in tokens if t["layers"] in groups[group["layers"]]]
        assert group["tokens"] == len(inside)
        assert group["token_share"] == len(inside) / len(tokens)
        part = math.fsum(k3(t["native"]) for t in inside)
        assert group["kl_share_native"] == pytest.approx(part / total)
        for side in ("native", "replay"):
            assert group[f"kl_k3_{side}"] == pytest.approx(mean([k3(t[side]) for t in inside]))
            far = [abs(t[side]) for t in inside]
            assert group[f"abs_logratio_mean_{side}"] == pytest.approx(mean(far))
            assert group[f"abs_logratio_max_{side}"] == max(far)
            assert group[f"extreme_2_{side}"] == mean([x > math.log(2) for x in far])
    differ = [t for t in tokens if t["layers"]]
    held = math.fsum(k3(t["native"]) for t in differ) / total
    assert found["kl_share_differing"] == pytest.approx(held)
    assert found["token_share_differing"] == len(differ) / len(tokens)
    left = math.fsum(k3(t["replay"]) for t in tokens) / total
    assert found["kl_removed_by_replay"] == pytest.approx(1 - left)


def octave(n: int) -> str:
    if n < 8:
        return str(n)
    low = 1 << (n.bit_length() - 1)
    return f"{low:,}-{2 * low - 1:,}"


@pytest.mark.usefixtures("in_parts")
def test_slices():
    rollouts = draw(2, 40)
    found = compare(rollouts)["slices"]
    parts: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for t in tokens_of(rollouts):
        if t["fed"] is not None:
            parts["segment"][("prompt", "answer", "reply")[t["fed"]]].append(t)
        parts["turn"][str(t["turn"])].append(t)
        parts["length"][octave(t["length"])].append(t)
        if t["lag"] is not None:
            parts["weight_lag"][octave(t["lag"])].append(t)
        for tag in t["tags"]:
            parts["tag"][tag].append(t)
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for a, b, _ in rollouts:
        for row in range(a.num_rows):
            n = differing_layers(a, b, row)
            if n is None:
                continue
            rows["segment", ("prompt", "answer", "reply")[a.segments[row]]].append(n)
            rows["turn", str(a.columns["turns"].data[row])].append(n)
            rows["length", octave(a.num_tokens)].append(n)
            rows["weight_lag", octave(9 - int(a.weight_versions[row]))].append(n)
            for tag in a.tags:
                rows["tag", tag].append(n)
    assert list(found) == sorted(parts)
    for dimension, entries in found.items():
        assert {e["label"] for e in entries} == set(parts[dimension])
        for e in entries:
            inside, cells = parts[dimension][e["label"]], rows[dimension, e["label"]]
            assert (e["tokens"], e["rows"]) == (len(inside), len(cells))
            assert e["cell_disagreement"] == pytest.approx(mean([n / 3 for n in cells]))
            assert e["token_disagreement"] == pytest.approx(mean([n > 0 for n in cells]))
            for side in ("native", "replay"):
                values = [k3(t[side]) for t in inside]
                assert e[f"kl_k3_{side}"] == pytest.approx(mean(values), rel=1e-9)
                extreme = [abs(t[side]) > math.log(2) for t in inside]
                assert e[f"extreme_2_{side}"] == pytest.approx(mean(extreme))
    assert [e["label"] for e in found["segment"]] == ["prompt", "answer", "reply"]
    lengths = [e["label"] for e in found["length"]]
    assert lengths == sorted(lengths, key=lambda text: int(text.split("-")[0]))


@pytest.mark.usefixtures("in_parts")
def test_worst_rollouts_and_tokens():
    rollouts = draw(3, 40)
    found = compare(rollouts)["worst"]
    tokens = tokens_of(rollouts)
    parts: dict[str, float] = defaultdict(float)
    for t in tokens:
        parts[t["rollout"]] += k3(t["native"])
    ranked = sorted(parts, key=lambda x: -parts[x])
    assert [r["id"] for r in found["rollouts"]] == ranked[:20]
    far = sorted(tokens, key=lambda t: (-abs(t["native"]), t["rollout"], t["position"]))[:50]
    assert [(t["id"], t["position"]) for t in found["tokens"]] == [
        (t["rollout"], t["position"]) for t in far
    ]
    by_id = {str(traces[0].rollout_id): traces for traces in rollouts}
    for entry, token in zip(found["tokens"], far, strict=True):
        a, b, _ = by_id[entry["id"]]
        at = entry["position"]
        assert entry["token_id"] == a.token_ids[at]
        assert entry["layers_differing"] == token["layers"]
        assert entry["logratio_native"] == token["native"]
        assert entry["logratio_replay"] == token["replay"]
        assert entry["sampler_logprob"] == a.logprobs[at]
        assert entry["trainer_logprob"] == pytest.approx(b.logprobs[at])
        context = entry["context"]
        assert (
            context["token_ids"]
            == a.token_ids[context["start"] : context["start"] + len(context["token_ids"])].tolist()
        )
        assert context["start"] == max(0, at - 12)
    for entry in found["rollouts"]:
        a, b, c = by_id[entry["id"]]
        mine = [t for t in tokens if t["rollout"] == entry["id"]]
        assert (entry["tokens"], entry["sampled_tokens"]) == (a.num_tokens, len(mine))
        assert entry["kl_k3_replay"] == pytest.approx(mean([k3(t["replay"]) for t in mine]))
        assert entry["seq_logratio_native"] == pytest.approx(sum(t["native"] for t in mine))
        excerpt = entry["excerpt"]
        assert excerpt["token_ids"] == a.token_ids.tolist()
        assert excerpt["layers"] == [differing_layers(a, b, i) for i in range(a.num_tokens)]
        known = [None if math.isnan(x) else x for x in (c.logprobs - a.logprobs).tolist()]
        assert excerpt["logratio_replay"] == pytest.approx(known, abs=1e-6)


def test_a_long_rollout_is_shown_around_its_worst_token():
    n, at = 3000, 2500
    ids = np.tile(np.array([0, 1], np.uint8), (n - 1, 3, 1))
    ids[::2, :, 1] = 2
    logprobs = np.full(n - 10, -1, np.float32)
    rng = np.random.default_rng(0)
    sides = []
    for change in (0, -2):
        values = logprobs.copy()
        values[at - 10] += change
        sides.append(
            RoutingTrace.build(
                spec=SPEC,
                token_ids=rng.integers(0, 9, n) if not sides else sides[0].token_ids,
                routed_experts=ids,
                prompt_len=10,
                logprobs=values,
                rollout_id="r/0/0/0/0",
            )
        )
    found = compare([sides])["worst"]
    excerpt = found["rollouts"][0]["excerpt"]
    assert (excerpt["start"], len(excerpt["token_ids"])) == (at - 200, 400)
    assert excerpt["logratio_native"][200] == -2
    assert [t["position"] for t in found["tokens"]] == [at]


def test_only_routing_is_compared_without_logprobs():
    found = compare(draw(4, 12, logprobs=False, sides=2))
    assert found["mismatch"] == {"native": None, "replay": None}
    assert found["routing"]["replay"] is None
    assert found["attribution"] is None
    assert found["worst"]["tokens"] == []
    shares = [r["cell_disagreement"] * r["tokens"] for r in found["worst"]["rollouts"]]
    assert len(shares) == 12
    assert all(math.isnan(r["kl_k3_native"]) for r in found["worst"]["rollouts"])
    json.dumps(found)


def test_a_third_side_without_logprobs_hides_nothing_of_the_second():
    rollouts = draw(8, 12)
    found = compare([[a, b, without_logprobs(c)] for a, b, c in rollouts])
    whole = compare(rollouts)
    assert found["routing"] == whole["routing"]
    assert found["mismatch"]["replay"] is None
    assert found["mismatch"]["native"] == whole["mismatch"]["native"]
    for group, other in zip(
        found["attribution"]["by_layers"], whole["attribution"]["by_layers"], strict=True
    ):
        assert group["kl_k3_native"] == other["kl_k3_native"]
        assert math.isnan(group["kl_k3_replay"])


def without_logprobs(trace: RoutingTrace) -> RoutingTrace:
    columns = {k: c for k, c in trace.columns.items() if k != "logprobs"}
    return RoutingTrace(trace.spec, trace.prompt_len, columns, trace.rollout_id, trace.provenance)


def test_rows_of_the_wrong_place_are_named():
    rng = np.random.default_rng(5)
    spec = RouterSpec(64, 4, tuple(range(6)), 6)
    rollouts = []
    for i in range(4):
        n = 200
        noise = rng.random((n, 6, 64))
        ids = noise.argsort(axis=-1)[..., :4].astype(np.uint8)
        tokens = rng.integers(0, 999, n)
        rollouts.append(
            [
                RoutingTrace.build(
                    spec=spec,
                    token_ids=tokens,
                    routed_experts=rows,
                    prompt_len=9,
                    rollout_id=RolloutId("r", str(i)),
                )
                for rows in (ids[:-1], ids[1:])
            ]
        )
    comparison = Comparison(spec)
    for a, b in rollouts:
        comparison.add(a, b)
    found = comparison.to_dict()["alignment"]
    assert found["fault"] == "row shift"
    assert "shifted by one" in found["text"]
    well = Comparison(spec)
    for a, _ in rollouts:
        well.add(a, a)
    assert well.to_dict()["alignment"] is None


@pytest.mark.slow
def test_the_worst_do_not_depend_on_how_rollouts_were_batched(monkeypatch):
    """Some rollouts without log-probabilities, and more equal ones than are kept."""
    rollouts = [
        [a, b if i % 2 else without_logprobs(b), c] for i, (a, b, c) in enumerate(draw(10, 30))
    ]
    twins = [draw_rollout(np.random.default_rng(11), 1, run=f"twin{i:02}") for i in range(30)]
    found = []
    for size in (1, 150, 1 << 20):
        monkeypatch.setattr(r3.comparison, "_TOKENS", size)
        for some in (rollouts, twins, rollouts + twins, (rollouts + twins)[::-1]):
            found.append(compare(some)["worst"])
    for k in range(4):
        assert json.dumps(found[k]) == json.dumps(found[k + 4]) == json.dumps(found[k + 8])
    assert json.dumps(found[2]) == json.dumps(found[3])
    assert len(found[1]["rollouts"]) == 20


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_log_probabilities_of_a_neighbour_are_named(shift):
    """Shifted by one, as a gather over the wrong ids or logits gives them."""
    rng = np.random.default_rng(9)
    comparison = Comparison(SPEC)
    for i in range(6):
        n = 60
        ids = np.tile(np.array([0, 1], np.uint8), (n - 1, 3, 1))
        ids[::2, :, 1] = 2
        sampler = -rng.exponential(1, n + 2)
        trainer = sampler + rng.normal(0, 0.05, n + 2)
        a, b = (
            RoutingTrace.build(
                spec=SPEC,
                token_ids=np.arange(n) + i,
                routed_experts=ids,
                prompt_len=5,
                logprobs=np.minimum(values[6:-1], 0).astype(np.float32),
                rollout_id=RolloutId("r", str(i)),
            )
            for values in (sampler, np.roll(trainer, -shift))
        )
        comparison.add(a, b)
    found = comparison.to_dict()["logprob_shift"]
    if shift == 0:
        assert found is None
    else:
        assert found["shift"] == shift
        assert found["correlation"] > 0.9
        assert abs(found["correlation_at_0"]) < 0.3


def test_other_tokens_and_routers_are_refused():
    (a, b, _), (other, _, _) = draw(6, 2)
    comparison = Comparison(SPEC)
    with pytest.raises(TraceError, match=r"rollout run/0/0/0/0: token \d+: the second side has id"):
        comparison.add(a, other)
    short = RoutingTrace.build(
        spec=SPEC,
        token_ids=a.token_ids[:-1],
        routed_experts=a.routed_experts[:-1],
        valid=a.valid[:-1],
        prompt_len=1,
    )
    with pytest.raises(TraceError, match=f"has {a.num_tokens - 1} tokens, expected {a.num_tokens}"):
        comparison.add(a, short)
    with pytest.raises(TraceError, match="the first side has the routers"):
        Comparison(RouterSpec(9, 2, (1, 2, 4), 5)).add(a, b)
    with pytest.raises(TraceError, match="the second side is None, expected a RoutingTrace"):
        comparison.add(a, None)
    comparison.add(a, b)
    with pytest.raises(TraceError, match="third side in some rollouts"):
        comparison.add(a, b, b)


def test_tags_without_end_share_a_slice():
    rng = np.random.default_rng(7)
    comparison = Comparison(SPEC)
    from r3 import Column
    from r3.columns import text_column

    a, b, _ = draw_rollout(rng, 0)
    for i in range(70):
        columns = {k: c for k, c in a.columns.items() if k != "tags"}
        columns["tags"] = Column(text_column([f"tag {i}"]).data, "rollout")
        name = RolloutId("run", str(i))
        comparison.add(
            RoutingTrace(SPEC, a.prompt_len, columns, name),
            RoutingTrace(SPEC, b.prompt_len, b.columns, name),
        )
    labels = [e["label"] for e in comparison.to_dict()["slices"]["tag"]]
    assert len(labels) == 65
    assert labels[-1] == "other"
    assert all(x <= y for x, y in pairwise(labels[:-1]))
