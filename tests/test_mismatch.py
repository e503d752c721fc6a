"""Log-prob mismatch against values worked out by hand, parts against the whole, refusals."""

from __future__ import annotations

import json
import math
from fractions import Fraction as F
from itertools import pairwise
from math import exp, fsum, log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_tools import near, of_ratios, state
from r3 import FormatError, TraceError
from r3.mismatch import LogprobMismatch
from r3.mismatch_parts import EDGES
from r3.mismatch_sums import exact_sum
from r3.quantiles import Quantiles

NAN, INF = math.nan, math.inf

# --- every figure, by hand -----------------------------------------------------------------

# probabilities (trainer, sampler) of three sequences, and their ratios as fractions
TOKENS = [(0.55, 0.22), (0.3, 0.54), (0.6, 0.48), (0.08, 0.96), (0.05, 0.05)]
TOKENS += [(0.995, 0.95), (0.00003, 0.0002)]
RATIOS = [F(5, 2), F(5, 9), F(5, 4), F(1, 12), F(1), F(199, 190), F(3, 20)]
OF_SEQUENCES = [F(25, 18), F(5, 48), F(597, 3800)]  # products: of 2, 3 and 2 tokens


def example(**kwargs) -> LogprobMismatch:
    trainer, sampler = np.log(np.array(TOKENS)).T
    return LogprobMismatch.of(trainer, sampler, cu_seqlens=np.array([0, 2, 5, 7]), **kwargs)


def by_hand() -> dict[str, float]:
    n, logs = 7, [log(r) for r in RATIOS]
    cut = [min(r, F(2)) for r in RATIOS]
    ess = [float(sum(w) ** 2 / (n * sum(x * x for x in w))) for w in (RATIOS, cut)]
    sums = [log(r) for r in OF_SEQUENCES]
    seq = OF_SEQUENCES  # the largest is 25/18: below the clip of 2
    ess_sequence = float(sum(seq) ** 2 / (3 * sum(w * w for w in seq)))
    # sums of |log|: the logarithms of products of max(r, 1 / r)
    absolute = [log(F(5, 2) * F(9, 5)), log(F(5, 4) * 12), log(F(199, 190) * F(20, 3))]
    means = [sums[0] / 2, sums[1] / 3, sums[2] / 2]
    # negative mean logarithms
    train = [-log(0.55 * 0.3) / 2, -log(0.6 * 0.08 * 0.05) / 3, -log(0.995 * 0.00003) / 2]
    roll = [-log(0.22 * 0.54) / 2, -log(0.48 * 0.96 * 0.05) / 3, -log(0.95 * 0.0002) / 2]
    p = [F(str(x)) for x, _ in TOKENS]
    q = [F(str(x)) for _, x in TOKENS]
    d = [abs(a - b) for a, b in zip(p, q, strict=True)]

    def spread(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True)) - sum(a) * sum(b) / n

    return {
        **{"tokens": 7, "sequences": 3, "left_out": 0},
        "kl_k1": -fsum(logs) / n,
        "kl_k3": (float(sum(RATIOS)) - n - fsum(logs)) / n,
        "chi2_token": float(sum(r * r for r in RATIOS) / n - 1),
        "logratio_min": log(1 / 12),
        "logratio_max": log(5 / 2),
        "abs_logratio_mean": fsum(map(abs, logs)) / n,
        # ascending: of 1, 199/190, 5/4, 9/5, 5/2, 20/3, 12
        "abs_logratio_p50": log(9 / 5),
        "abs_logratio_p90": log(20 / 3) + 0.4 * log(12 * 3 / 20),  # 0.9 * 6 = 5.4
        "abs_logratio_p99": log(20 / 3) + 0.94 * log(12 * 3 / 20),
        "abs_logratio_p999": log(20 / 3) + 0.994 * log(12 * 3 / 20),
        "abs_logratio_max": log(12),
        "extreme_1.1": 5 / 7,
        "extreme_1.5": 4 / 7,
        "extreme_2": 3 / 7,
        "extreme_5": 2 / 7,
        "extreme_10": 1 / 7,
        "ratio_fraction_high": 1 / 7,  # 5/2
        "ratio_fraction_low": 2 / 7,  # 1/12, 3/20
        "ratio_mean": float(sum(RATIOS) / n),
        "ratio_truncated_mean": float(sum(cut) / n),
        "ess": ess[0],
        "ess_truncated": ess[1],
        "ess_sequence": ess_sequence,
        "ess_sequence_truncated": ess_sequence,
        "seq_logratio_mean": fsum(sums) / 3,
        "seq_logratio_abs_mean": fsum(map(abs, sums)) / 3,
        "seq_logratio_abs_max": log(48 / 5),
        "seq_abs_logratio_mean": fsum(absolute) / 3,
        "seq_abs_logratio_max": log(15),
        "seq_geometric_mean": fsum(float(r) ** (1 / k) for r, k in zip(seq, (2, 3, 2), strict=True))
        / 3,
        "seq_mean_logratio_abs_max": log(3800 / 597) / 2,
        "chi2_seq": float(sum(r * r for r in seq) / 3 - 1),
        "training_log_ppl": fsum(train) / 3,
        "rollout_log_ppl": fsum(roll) / 3,
        "training_ppl": fsum(map(exp, train)) / 3,
        "rollout_ppl": fsum(map(exp, roll)) / 3,
        "log_ppl_diff": -fsum(means) / 3,
        "log_ppl_abs_diff": fsum(map(abs, means)) / 3,
        "log_ppl_diff_max": log(3800 / 597) / 2,
        "log_ppl_diff_min": -log(25 / 18) / 2,
        "ppl_ratio": fsum(float(1 / r) ** (1 / k) for r, k in zip(seq, (2, 3, 2), strict=True)) / 3,
        "probs_diff_mean": float(sum(d) / n),
        "probs_diff_max": 0.88,
        "probs_diff_std": math.sqrt(spread(d, d) / 6),
        "probs_pearson": float(spread(p, q)) / math.sqrt(spread(p, p) * spread(q, q)),
    }


def test_every_figure_by_hand():
    found, expected = example().metrics(), by_hand()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == near(value), name


def test_a_clip_by_hand():
    found = example(clip=(0.1, 1.25)).metrics()
    assert found["ratio_fraction_low"] == 1 / 7  # 1/12
    assert found["ratio_fraction_high"] == pytest.approx(1 / 7, abs=1e-12)  # 5/2, and 5/4 is not
    cut = [min(r, F(5, 4)) for r in RATIOS]
    assert found["ratio_truncated_mean"] == near(float(sum(cut) / 7))
    assert found["ess_truncated"] == near(float(sum(cut) ** 2 / (7 * sum(r * r for r in cut))))
    seq = [min(r, F(5, 4)) for r in OF_SEQUENCES]
    expected = float(sum(seq) ** 2 / (3 * sum(r * r for r in seq)))
    assert found["ess_sequence_truncated"] == near(expected)
    assert found["ess_sequence"] == near(by_hand()["ess_sequence"])


def test_survival_by_hand():
    thresholds = [log(x) for x in (1 / 2, 1.01, 1.2, 1.79, 1.81, 3, 11.9, 12.1)]
    assert example().survival(np.array(thresholds)).tolist() == [
        near(x / 7) for x in (7, 6, 5, 4, 3, 2, 1, 0)
    ]


def test_buckets_by_hand():
    found = example().buckets()
    edges = list(pairwise(EDGES))
    assert edges[0] == (0, 1e-4)
    assert edges[-1] == (0.99, 1)
    # ratios of the tokens whose probability is in each of the eight
    r = dict(zip("abcdefg", RATIOS, strict=True))
    for side, parts in (
        ("sampler", ["", "g", "", "e", "ac", "b", "df", ""]),
        ("trainer", ["g", "", "", "de", "b", "ac", "", "f"]),
    ):
        assert [(b["low"], b["high"]) for b in found[side]] == edges
        for bucket, part in zip(found[side], parts, strict=True):
            ratios = [float(r[x]) for x in part]
            n = len(ratios)
            assert bucket["tokens"] == n
            shares = [fsum(abs(log(x)) for x in ratios), fsum(x - 1 - log(x) for x in ratios)]
            shares.append(sum(max(x, 1 / x) > 2 for x in ratios))
            expected = [x / n if n else NAN for x in shares]
            names = ("abs_logratio_mean", "kl_k3", "extreme_2")
            for name, value in zip(names, expected, strict=True):
                assert bucket[name] == near(value), (side, bucket)


def test_buckets_hold_their_lower_edge():
    inner = np.log(EDGES[1:-1])
    found = LogprobMismatch.of(np.zeros(7), inner).buckets()
    assert [b["tokens"] for b in found["sampler"]] == [0, 1, 1, 1, 1, 1, 1, 1]
    assert [b["tokens"] for b in found["trainer"]] == [0, 0, 0, 0, 0, 0, 0, 7]  # p = 1
    # above 1 by rounding, and too small for float64
    found = LogprobMismatch.of(np.array([0.005, -900]), np.zeros(2)).buckets()
    assert [b["tokens"] for b in found["trainer"]] == [1, 0, 0, 0, 0, 0, 0, 1]


def test_equal_models():
    sampler = np.log(np.array([[0.5, 0.25], [0.125, 1.0]]))
    found = LogprobMismatch.of(sampler, sampler).metrics()
    ones = ("ratio_mean", "ratio_truncated_mean", "ess", "ess_truncated", "ess_sequence")
    ones += ("ess_sequence_truncated", "seq_geometric_mean", "ppl_ratio", "probs_pearson")
    known = {"tokens": 4, "sequences": 2, **dict.fromkeys(ones, 1.0)}
    known |= {"training_log_ppl": 1.5 * log(2), "rollout_log_ppl": 1.5 * log(2)}
    # 8 ** 0.5 twice: of means of log 2 and 2 log 2, of 3 log 2 and 0
    known |= {"training_ppl": 8**0.5, "rollout_ppl": 8**0.5}
    for name, value in found.items():
        assert value == near(known.get(name, 0.0)), name
        assert math.copysign(1, value) == 1, name  # no -0.0 to be printed


def test_a_single_token_has_no_deviation_and_no_correlation():
    found = of_ratios([0.5]).metrics()
    assert found["ess"] == found["ess_sequence"] == 1
    assert found["probs_diff_mean"] == near(1 - exp(-0.5))
    assert math.isnan(found["probs_diff_std"])
    assert math.isnan(found["probs_pearson"])


def test_constant_probabilities():
    trainer, sampler = np.full(30, log(0.6)), np.full(30, log(0.5))
    found = LogprobMismatch.of(trainer, sampler).metrics()
    assert found["probs_diff_std"] == 0
    assert math.isnan(found["probs_pearson"])


def test_long_sequences_leave_no_figure_undefined():
    """Sums of sequences go beyond what exp can hold: weights do not, ratios are inf or 0."""
    found = of_ratios([[0.25] * 4000, [0.25] * 4000]).metrics()
    assert found["ess_sequence"] == 1
    assert found["seq_logratio_abs_max"] == 1000
    assert found["chi2_seq"] == INF
    assert found["seq_geometric_mean"] == near(exp(0.25))
    found = of_ratios([[-0.25] * 4000, [-0.25] * 4000, [-0.5] * 4000]).metrics()
    assert found["ess_sequence"] == near(2 / 3)
    assert found["chi2_seq"] == -1


@pytest.mark.parametrize("shift", [0, 88, -88, 300, -300, 800, -800, 1e5, -1e5])
def test_ess_does_not_depend_on_the_size_of_weights(shift):
    """Weights 1, 2, 4 times exp(shift): 49 / 63."""
    step = 2.0**-9
    lr = np.round((np.log([1, 2, 4]) + shift) / step) * step  # the same digits for every shift
    w = [F(exp(x - lr[0])) for x in lr]
    expected = float(sum(w) ** 2 / (3 * sum(x * x for x in w)))
    assert expected == pytest.approx(49 / 63, abs=2e-3)
    together = of_ratios(lr).metrics()
    assert together["ess"] == near(expected, 1e-10)
    rows = of_ratios(lr[:, None]).metrics()
    assert rows["ess"] == near(expected, 1e-10)
    assert rows["ess_sequence"] == near(expected, 1e-10)


# --- parts and wholes ----------------------------------------------------------------------

LOGPROBS = st.one_of(
    st.floats(-12, 0),
    st.sampled_from([0.0, -0.0, -1e-9, -100.0, -800.0, -1e5, NAN, -INF, INF, 3.0]),
)
SEQUENCES = st.lists(
    st.lists(st.tuples(LOGPROBS, LOGPROBS, st.booleans()), min_size=1, max_size=9),
    min_size=1,
    max_size=8,
)


def of_sequences(sequences) -> LogprobMismatch:
    tokens = [token for sequence in sequences for token in sequence]
    bounds = np.cumsum([0, *map(len, sequences)])
    t, s, mask = (np.array([token[i] for token in tokens]) for i in range(3))
    return LogprobMismatch.of(t, s, cu_seqlens=bounds, mask=mask)


def without_examples(m: LogprobMismatch) -> str:
    return json.dumps({**m.to_dict(), "examples": []}, allow_nan=False)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)  # the first imports ddsketch
@given(SEQUENCES, st.sampled_from([0, 3, 10, 10**6]), st.randoms(use_true_random=False))
def test_any_partition_gives_the_same_bits(sequences, exact, random):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quantiles, "EXACT", exact)
        whole = of_sequences(sequences)
        order = random.sample(sequences, len(sequences))
        cuts = sorted(random.sample(range(1, len(order)), random.randrange(len(order))))
        bounds = zip([0, *cuts], [*cuts, len(order)], strict=True)
        states = [of_sequences(order[a:b]) for a, b in bounds] + [LogprobMismatch.zero()]
        while len(states) > 1:  # any order, any nesting
            a = states.pop(random.randrange(len(states)))
            b = states.pop(random.randrange(len(states)))
            states.append(a + b)
        assert without_examples(states[0]) == without_examples(whole)
        again = LogprobMismatch.from_dict(json.loads(state(whole)))
        assert state(again) == state(whole)
        assert json.dumps(again.metrics()) == json.dumps(whole.metrics())


@given(SEQUENCES)
def test_sums_are_those_of_plain_arithmetic(sequences):
    """Figures of any batch against math.fsum over its tokens"""
    kept = [
        [(t, s) for t, s, flag in q if flag and -INF < t <= 0.01 and -INF < s <= 0.01]
        for q in sequences
    ]
    kept = [q for q in kept if q]
    lr = [t - s for q in kept for t, s in q]
    found = of_sequences(sequences).metrics()
    assert (found["tokens"], found["sequences"]) == (len(lr), len(kept))
    if not lr:
        return
    n, scale = len(lr), fsum(map(abs, lr)) / len(lr)
    assert found["kl_k1"] == pytest.approx(-fsum(lr) / n, rel=1e-12, abs=1e-12 * scale)
    assert found["abs_logratio_mean"] == pytest.approx(scale, rel=1e-12)
    assert found["abs_logratio_max"] == max(map(abs, lr))
    assert (found["logratio_min"], found["logratio_max"]) == (min(lr), max(lr))
    for tau in (1.1, 1.5, 2, 5, 10):
        assert found[f"extreme_{tau}"] == sum(abs(x) > log(tau) for x in lr) / n
    assert found["ratio_fraction_high"] == sum(x > log(2) for x in lr) / n
    sums = [fsum(t - s for t, s in q) for q in kept]
    assert found["seq_logratio_abs_max"] == near(max(map(abs, sums)), 1e-12, 1e-12 * scale * n)
    highest = max(lr)
    if max(map(abs, lr)) < 300:
        w = [exp(x - highest) for x in lr]
        assert found["ess"] == near(fsum(w) ** 2 / (n * fsum(x * x for x in w)), 1e-9)
        assert found["ratio_mean"] == near(exp(highest) * fsum(w) / n, 1e-9)
    cut = [exp(min(x, log(2)) - min(highest, log(2))) for x in lr]
    expected = fsum(cut) ** 2 / (n * fsum(x * x for x in cut))
    assert found["ess_truncated"] == near(expected, 1e-9)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_exact_sums(values):
    parts = exact_sum(values)
    total = sum(map(F, values))
    if all(map(math.isfinite, parts)):
        assert sum(map(F, parts)) == total
        assert exact_sum(parts) == parts
        assert list(map(abs, parts)) == sorted(map(abs, parts), reverse=True)
    else:
        assert parts == (INF if total > 0 else -INF,)
        assert abs(total) > np.finfo(float).max


def test_large_batches_do_not_lose_what_is_small():
    """1e16 and ones: a sum in floats would lose every one of them."""
    assert exact_sum([1e16, *[1.0] * 10, -1e16]) == (10.0,)
    assert exact_sum([1e16, 1.0]) == (1e16, 1.0)


def test_more_tokens_than_are_measured_at_a_time():
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 4000, 40)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    lr = rng.normal(0, 0.2, bounds[-1])
    lr[[0, 20_000, -1]] = 300, -300, 5  # of other levels of weights
    whole = of_ratios(lr, cu_seqlens=bounds)
    assert whole.counts["tokens"] > 65_536
    parts = [of_ratios(lr[a:b]) for a, b in pairwise(bounds)]
    assert state(sum(parts, LogprobMismatch.zero())) == state(whole)
    assert whole.metrics()["abs_logratio_mean"] == near(fsum(map(abs, lr)) / len(lr))
    # and one sequence of that length
    assert of_ratios(lr).metrics()["abs_logratio_mean"] == near(fsum(map(abs, lr)) / len(lr))


def test_states_do_not_change():
    t, s = np.array([-1.0, -2.0]), np.array([-1.5, -2.0])
    found = LogprobMismatch.of(t, s)
    before = state(found)
    t[:] = 0
    _ = found + found
    found.left_out["trainer_nan"] = 7
    found.metrics().clear()
    found.to_dict()["counts"].clear()
    assert state(found) == before


# --- what is refused -----------------------------------------------------------------------

ONE = np.array([-1.0, -2.0])


def nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


DEEP = nested(5000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ONE, ONE[:1]), r"shapes \[2\] \(trainer\) and \[1\] \(sampler\)"),
        ((ONE, ONE[None]), r"shapes \[2\] \(trainer\) and \[1, 2\]"),
        ((ONE[None, None], ONE[None, None]), r"expected the same \[tokens\]"),
        ((np.float64(-1), np.float64(-1)), r"shapes \[\] \(trainer\)"),
        ((np.array([-1, -2]), ONE), r"log-probabilities \(trainer\) are int64, expected floats"),
        ((ONE, torch.tensor([-1, -2])), r"\(sampler\) are int64, expected floats"),
        ((ONE, ONE.astype(complex)), r"\(sampler\) are complex128"),
        ((ONE, ["a", "b"]), r"\(sampler\) are <U1"),
        ((ONE, [[1.0], 2.0]), r"\(sampler\) is not an array"),
        ((None, ONE), r"\(trainer\) are object"),
    ],
)
def test_logprobs_that_are_refused(arguments, message):
    with pytest.raises(TraceError, match=message):
        LogprobMismatch.of(*arguments)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cu_seqlens": [0, 1]}, "ends at 1, expected .* the number of tokens, 2"),
        ({"cu_seqlens": [0, 2, 1, 2]}, "ascending"),
        ({"cu_seqlens": [0, 1, 1, 2]}, "ascending"),
        ({"cu_seqlens": [1, 2]}, "from 0"),
        ({"cu_seqlens": [0]}, "at least two"),
        ({"cu_seqlens": []}, "expected integers"),
        ({"cu_seqlens": 2}, "expected integers"),
        ({"cu_seqlens": [0.0, 2.0]}, "cu_seqlens is float64 of shape"),
        ({"cu_seqlens": [[0, 2]]}, r"cu_seqlens is int64 of shape \[1, 2\]"),
        ({"mask": [1]}, r"mask has shape \[1\], expected \[2\]"),
        ({"mask": [[1, 1]]}, r"mask has shape \[1, 2\]"),
        ({"mask": [1, 2]}, r"mask is 2 at \[1\], expected bool, or 0 and 1"),
        ({"mask": [-1, 1]}, r"mask is -1 at \[0\]"),
        ({"mask": [1, 0.5]}, r"mask is 0.5 at \[1\]"),
        ({"mask": [1, NAN]}, r"mask is nan at \[1\]"),
        ({"mask": ["a", "b"]}, "mask is <U1, expected bool"),
        ({"names": ["a", "b"]}, "2 names, expected one for each of 1 sequences"),
        ({"names": []}, "0 names, expected one for each of 1 sequences"),
        ({"names": 5}, "names is of type int, expected one for each sequence"),
        ({"clip": (2.0, 0.5)}, r"clip is \(2.0, 0.5\), expected bounds"),
        ({"clip": (0.5, 0.9)}, "clip"),
        ({"clip": (1.1, 2.0)}, "clip"),
        ({"clip": (1.0, 1.0)}, "clip"),
        ({"clip": (-0.1, 2.0)}, "clip"),
        ({"clip": (NAN, 2.0)}, "clip"),
        ({"clip": (0.5, INF)}, "clip"),
        ({"clip": 2.0}, "clip"),
        ({"clip": (0.5, 10**400)}, "clip"),
        ({"clip": DEEP}, "clip"),
        ({"clip": (0.5, 1, 2)}, "clip"),
        ({"clip": ("a", "b")}, "clip"),
    ],
)
def test_settings_that_are_refused(kwargs, message):
    with pytest.raises(TraceError, match=message):
        LogprobMismatch.of(ONE, ONE, **kwargs)


def test_bounds_with_rows_are_refused():
    with pytest.raises(TraceError, match=r"shape \[1, 2\] and cu_seqlens, expected none: each row"):
        LogprobMismatch.of(ONE[None], ONE[None], cu_seqlens=[0, 2])


def test_other_clips_do_not_add():
    with pytest.raises(TraceError, match=r"clip \(0.5, 5.0\) to one of \(0.5, 2.0\)"):
        _ = of_ratios([0.0]) + of_ratios([0.0], clip=(0.5, 5))
    with pytest.raises(TypeError):
        _ = of_ratios([0.0]) + 1


def test_a_lower_bound_of_zero_is_none():
    found = of_ratios([-800.0, 0.0], clip=(0, 2)).metrics()
    assert found["ratio_fraction_low"] == 0


def changed(path: list[object], value: object) -> dict:
    found = json.loads(state(example()))
    *before, last = path
    inner = found
    for key in before:
        inner = inner[key]
    if value is KeyError:
        del inner[last]
    else:
        inner[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], "r3-mismatch/2"),
        (["clip"], KeyError),
        (["more"], 1),
        (["clip"], [2, 0.5]),
        (["clip"], None),
        (["counts"], []),
        (["counts", "tokens"], KeyError),
        (["counts", "tokens"], 8),
        (["counts", "tokens"], 7.0),
        (["counts", "high"], -1),
        (["counts", "high"], 2**63),
        (["counts", "high"], True),
        (["counts", "more"], 1),
        (["counts", "sequences"], 0),
        (["counts", "sequences"], 8),
        (["sums", "lr"], 1.0),
        (["sums", "lr"], [None]),
        (["sums", "lr"], [True]),
        (["sums", "lr"], ["1"]),
        (["sums", "lr"], [NAN]),
        (["sums", "lr"], [10**400]),
        (["maxima", "lr"], None),
        (["maxima"], {}),
        (["weights", "token"], []),
        (["weights", "token"], [[0, [1.0]]]),
        (["weights", "token"], [[0.5, [1.0], [1.0]]]),
        (["weights", "token"], [[0, [], [1.0]]]),
        (["weights", "token"], [[0, [-1.0], [1.0]]]),
        (["weights", "token"], [[0, ["inf"], [1.0]]]),
        (["weights", "token"], [[0, [1.0], [1.0]], [0, [1.0], [1.0]]]),
        (["weights", "token"], {}),
        (["weights", "token"], [[10**16, [1.0], [1.0]]]),
        (["abs_logratios"], None),
        (["abs_logratios", "count"], 6),
        (["abs_logratios"], {"count": 0, "values": ""}),
        (["examples"], "text"),
        (["examples"], [1]),
        (["examples"], ["text"] * 9),
    ],
)
def test_what_no_state_writes_is_refused(path, value):
    with pytest.raises(FormatError, match="a mismatch cannot be read: "):
        LogprobMismatch.from_dict(changed(path, value))


PLACES = [
    *(["format"], ["clip"], ["counts"], ["counts", "tokens"], ["sums", "lr"], ["sums", "lr", 0]),
    *(["maxima", "lr"], ["weights", "token"], ["weights", "token", 0], ["weights", "token", 0, 0]),
    *(["weights", "token", 0, 1], ["weights", "token", 0, 1, 0], ["abs_logratios"]),
    *(["abs_logratios", "count"], ["abs_logratios", "values"], ["examples"], ["examples", 0]),
]


@pytest.mark.parametrize("path", PLACES, ids=str)
def test_depth_takes_no_stack(path):
    found = changed(["examples"], ["text"])
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = DEEP
    with pytest.raises(FormatError, match="a mismatch cannot be read: ") as caught:
        LogprobMismatch.from_dict(found)
    assert len(str(caught.value)) < 2000


def test_a_count_of_thousands_of_digits():
    with pytest.raises(FormatError, match="a mismatch cannot be read: "):
        LogprobMismatch.from_dict(changed(["counts", "high"], 10**5000))


def test_names_of_any_kind_of_list():
    for names in (["a"], ("a",), np.array(["a"])):
        found = LogprobMismatch.of(np.array([NAN]), np.array([-1.0]), names=names)
        assert found.examples[0].startswith("sequence a: token 0")


@pytest.mark.parametrize("found", [None, [], "text", {}, {"format": "r3-mismatch/1"}])
def test_what_is_no_state_is_refused(found):
    with pytest.raises(FormatError, match="a mismatch cannot be read: "):
        LogprobMismatch.from_dict(found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["inf", "nan", "x"]),
    lambda x: st.lists(x, max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(st.data(), JSON)
def test_whatever_is_read_can_be_used_or_is_refused(data, value):
    path, inner = [], example().to_dict()
    while isinstance(inner, dict | list) and inner and data.draw(st.integers(0, 5)):
        keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
        path.append(data.draw(st.sampled_from(keys)))
        inner = inner[path[-1]]
    found = changed(path, value) if path else value
    try:
        read = LogprobMismatch.from_dict(found)
    except FormatError:
        return
    for m in (read, read + example(clip=read.clip)):
        assert set(m.metrics()) == set(by_hand())
        assert set(m.buckets()) == {"sampler", "trainer"}
        assert state(LogprobMismatch.from_dict(json.loads(state(m)))) == state(m)
