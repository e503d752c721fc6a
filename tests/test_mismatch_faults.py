"""The faults of a published monitor of the mismatch, each with the right value by hand.

They are numbered as in the project's list of what that monitor did (its inputs: log-probs of
trainer and sampler, a mask, a sequence id for each token, a clip of 2). There are no sequence ids
here: sequences are rows, or lie between the bounds cu_seqlens.
"""

from __future__ import annotations

import math
from fractions import Fraction as F
from math import exp, log

import numpy as np
import pytest
import torch

from mismatch_tools import near, no_figures, of_ratios, state
from r3 import TraceError
from r3.mismatch import LogprobMismatch

NAN, INF = math.nan, math.inf


def test_fault_1_an_empty_mask():
    no_figures(of_ratios([1.0, 2.0], mask=np.zeros(2, bool)))


@pytest.mark.parametrize("lr", [100, 89])
def test_fault_2_and_2b_a_ratio_beyond_float32(lr):
    sampler = torch.tensor([-1.0, -lr])
    found = LogprobMismatch.of(torch.tensor([-1.0, 0.0]), sampler).metrics()
    r = exp(lr)
    assert found["kl_k3"] == near((r - 1 - lr) / 2)
    assert found["chi2_token"] == near((1 + r * r) / 2 - 1)
    assert found["ratio_mean"] == near((1 + r) / 2)
    assert found["ess"] == near(0.5)  # one token outweighs the other
    assert found["ess_truncated"] == near(0.9)  # (1 + 2)**2 / (2 * (1 + 4))
    assert found["abs_logratio_p99"] == near(0.99 * lr)


def test_a_ratio_beyond_float64():
    found = of_ratios([800.0, 0.0]).metrics()
    assert found["kl_k3"] == found["chi2_token"] == found["ratio_mean"] == INF
    assert found["ess"] == near(0.5)
    assert found["ess_truncated"] == near(0.9)
    assert found["abs_logratio_max"] == 800


@pytest.mark.parametrize(
    ("trainer", "sampler", "kinds"),
    [
        pytest.param(-1.0, -INF, ["sampler_inf"], id="fault_3"),
        pytest.param(-INF, -1.0, ["trainer_inf"], id="fault_3b"),
        pytest.param(-INF, -INF, ["trainer_inf", "sampler_inf"], id="fault_3c"),
        pytest.param(NAN, -1.0, ["trainer_nan"], id="fault_4"),
        pytest.param(NAN, NAN, ["trainer_nan", "sampler_nan"], id="fault_4_both"),
        pytest.param(1.5, -1.0, ["trainer_positive"], id="fault_12"),
        pytest.param(-1.0, 0.02, ["sampler_positive"], id="fault_12_sampler"),
        pytest.param(INF, -3e300, ["trainer_inf", "sampler_inf"], id="as_good_as_infinite"),
    ],
)
def test_faults_3_4_and_12_a_value_that_is_no_logprob(trainer, sampler, kinds):
    """It is left out, counted and named; the figures are those of the other tokens."""
    t, s = np.array([-1.0, -2.0, trainer, -0.5]), np.array([-1.5, -2.0, sampler, -0.25])
    found = LogprobMismatch.of(t, s, cu_seqlens=[0, 1, 4], names=["p-0", "p-1"])
    assert {k: n for k, n in found.left_out.items() if n} == dict.fromkeys(kinds, 1)
    assert found.examples == (
        f"sequence p-1: token 1: log-probability {trainer} (trainer), {sampler} (sampler)",
    )
    keep = [0, 1, 3]
    expected = LogprobMismatch.of(t[keep], s[keep], cu_seqlens=[0, 1, 3]).metrics()
    assert found.metrics() == {**expected, "left_out": 1}
    message = f"sequence p-1: token 1: log-probability {trainer} .* expected finite numbers of at"
    with pytest.raises(TraceError, match=message.replace("+", r"\+")):
        LogprobMismatch.of(t, s, cu_seqlens=[0, 1, 4], names=["p-0", "p-1"], strict=True)
    # one that does not count may be anything
    mask = [True, True, False, True]
    masked = LogprobMismatch.of(t, s, cu_seqlens=[0, 1, 4], mask=mask, strict=True)
    assert masked.metrics() == expected
    assert not any(masked.left_out.values())


def test_a_sequence_left_out_as_a_whole_is_none():
    found = LogprobMismatch.of(np.array([[-1.0], [NAN]]), np.array([[-1.0], [-1.0]]))
    assert found.metrics()["sequences"] == 1
    no_figures(LogprobMismatch.of(np.array([NAN]), np.array([-1.0])))


def test_rounding_above_a_probability_of_one_counts():
    found = LogprobMismatch.of(np.array([0.01, 0.0]), np.array([0.0, 0.01]), strict=True).metrics()
    assert found["tokens"] == 2
    assert found["abs_logratio_max"] == 0.01
    assert found["kl_k1"] == 0


def test_the_first_eight_examples_are_kept():
    bad = LogprobMismatch.of(np.full(20, NAN), np.full(20, -1.0))
    assert [text.split(":")[1] for text in bad.examples] == [f" token {i}" for i in range(8)]
    other = LogprobMismatch.of(np.full(2, INF), np.full(2, -1.0))
    assert (other + bad).examples == other.examples + bad.examples[:6]
    assert (bad + other).examples == bad.examples
    assert (bad + other).metrics()["left_out"] == 22


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "float32", "bool"])
def test_fault_5_a_mask_of_integers_is_no_index(dtype):
    lr, mask = [3.0, 0.5, 0.25, 2.0], np.array([0, 1, 1, 0])
    expected = of_ratios([0.5, 0.25])
    assert state(of_ratios(lr, mask=mask.astype(dtype))) == state(expected)
    as_torch = torch.tensor(mask).to(getattr(torch, dtype))
    assert state(of_ratios(lr, mask=as_torch)) == state(expected)


def test_fault_6_padding_belongs_to_no_sequence():
    """There: padding with sequence id -1. Here: the same as rows with padding of any content."""
    packed = of_ratios([0.5, -0.25, 1.0, 0.125, 0.0], cu_seqlens=[0, 3, 5])
    trainer, sampler = np.full((2, 4), NAN), np.full((2, 4), 7e8)
    for row, lr in enumerate(([0.5, -0.25, 1.0], [0.125, 0.0])):
        trainer[row, 4 - len(lr) :] = np.minimum(lr, 0)  # padded on the left
        sampler[row, 4 - len(lr) :] = -np.maximum(lr, 0)
    mask = np.array([[0, 1, 1, 1], [0, 0, 1, 1]])
    assert state(LogprobMismatch.of(trainer, sampler, mask=mask, strict=True)) == state(packed)


def test_fault_6b_bounds_beyond_the_tokens_take_no_memory():
    """There: one masked id of 10**9 took 4 GB. Here a bound of that size is refused."""
    with pytest.raises(TraceError, match=r"ends at 1000000000, expected .* number of tokens, 3"):
        of_ratios([0.5, 0.25, 0.125], cu_seqlens=[0, 2, 10**9], mask=[1, 1, 0])


def test_fault_6c_nothing_but_padding():
    no_figures(of_ratios(np.zeros((3, 4)), mask=np.zeros((3, 4), int)))


@pytest.mark.slow
def test_fault_7_more_than_two_to_the_24th_tokens():
    """In one call, of which only the last row is not as the others, and as a sum of states."""
    rows = 129  # of 2**17 tokens each
    s = torch.full((rows, 2**17), -1.0, dtype=torch.bfloat16)
    t = s.clone()
    t[-1] = -3.0
    found = LogprobMismatch.of(t, s)
    figures = found.metrics()
    assert figures["tokens"] == rows * 2**17 > 2**24
    assert figures["abs_logratio_p99"] == 0  # 128 / 129 is more than 0.99
    assert figures["abs_logratio_p999"] == pytest.approx(2, rel=0.005)
    assert figures["kl_k3"] == near((exp(-2) - 1 + 2) / rows)
    assert figures["extreme_5"] == near(1 / rows)
    alike = LogprobMismatch.of(s[:1], s[:1])
    for _ in range(7):
        alike = alike + alike
    assert state(alike + LogprobMismatch.of(t[-1:], s[-1:])) == state(found)


def test_fault_8_truncation_hides_one_token_that_outweighs_all():
    """999 equal tokens and one of ratio 1000."""
    found = of_ratios([0.0] * 999 + [log(1000)]).metrics()
    assert found["ess"] == near(1999**2 / (1000 * (999 + 1000**2)))  # 0.00399
    assert found["ess_truncated"] == near(1001**2 / (1000 * (999 + 4)))  # 0.9990


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_fault_9_9b_and_13_dtypes_layouts_and_gradients(dtype):
    """What a dtype can hold gives the same state, bit for bit, in every form."""
    generator = torch.Generator().manual_seed(3)
    s = -torch.rand(4, 6, generator=generator).mul(8).to(torch.bfloat16).to(torch.float16) - 0.25
    t = (s + torch.randn(4, 6, generator=generator) / 4).clamp(max=0).to(torch.bfloat16)
    s, t = s.to(torch.bfloat16).double().numpy(), t.double().numpy()
    mask = np.ones((4, 6), bool)
    mask[1, 3:] = mask[2] = False
    expected = state(LogprobMismatch.of(t, s, mask=mask))
    as_t, as_s = (torch.tensor(x).to(getattr(torch, dtype)) for x in (t, s))
    forms = [(as_t, as_s), (as_t.requires_grad_(), as_s)]
    wide = torch.zeros(6, 4, dtype=as_t.dtype)
    transposed = wide.copy_(as_t.detach().T).T  # not contiguous
    forms.append((transposed, as_s))
    if dtype != "bfloat16":
        forms.append((t.astype(dtype), s.astype(dtype)))
        forms.append((np.asfortranarray(t.astype(dtype)), as_s.numpy()[::-1][::-1]))
        forms.append((t.astype(dtype).astype(f">f{t.astype(dtype).itemsize}"), as_s))
    for trainer, sampler in forms:
        assert state(LogprobMismatch.of(trainer, sampler, mask=mask)) == expected
        flat = LogprobMismatch.of(
            trainer.reshape(-1),
            sampler.reshape(-1),
            mask=mask.reshape(-1),
            cu_seqlens=[0, 6, 12, 18, 24],
        )
        assert state(flat) == expected
    assert as_t.requires_grad
    assert as_t.grad is None


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_fault_9c_bounds_of_any_integer_dtype(dtype):
    lr = [0.5, -1.0, 0.25]
    expected = state(of_ratios(lr, cu_seqlens=np.array([0, 1, 3])))
    assert state(of_ratios(lr, cu_seqlens=np.array([0, 1, 3], dtype))) == expected
    assert state(of_ratios(lr, cu_seqlens=torch.tensor([0, 1, 3]).to(getattr(torch, dtype)))) == (
        expected
    )


def test_fault_10_k3_does_not_cancel():
    """float32 log-probs 1e-4 apart: k3 is 5e-9, which r - 1 - lr loses in float32."""
    sampler = np.full(3, -1, np.float32)
    found = LogprobMismatch.of(sampler.astype(np.float64) + 1e-4, sampler).metrics()
    assert found["kl_k3"] == pytest.approx(5.0001666708330726e-09, rel=1e-9)
    # both in float32: what they hold, and the series of exp in exact arithmetic
    trainer = sampler + np.float32(1e-4)
    lr = F(float(trainer[0])) - F(float(sampler[0]))
    k3 = float(sum(lr**i / math.factorial(i) for i in range(2, 8)))
    assert LogprobMismatch.of(trainer, sampler).metrics()["kl_k3"] == pytest.approx(k3, rel=1e-9)


def test_fault_11_rows_are_sequences():
    """There: a sequence id for each token was looked up by row. Here: as the same packed."""
    lr = np.array([[0.5, 1.0, -0.25], [-2.0, 0.125, 0.0]])
    found = of_ratios(lr)
    assert state(found) == state(of_ratios(lr.reshape(-1), cu_seqlens=[0, 3, 6]))
    figures = found.metrics()
    assert figures["sequences"] == 2
    assert figures["seq_logratio_abs_max"] == 1.875
    assert figures["seq_abs_logratio_max"] == 2.125
    assert figures["seq_logratio_mean"] == (1.25 - 1.875) / 2


def test_fault_14_errors_that_cancel_in_a_sequence():
    found = of_ratios([[2.0, -2.0], [0.0, 0.0]]).metrics()
    assert found["seq_logratio_abs_max"] == found["seq_mean_logratio_abs_max"] == 0
    assert found["ess_sequence"] == 1
    # what shows them: the sum of sizes, and the tail over tokens
    assert found["seq_abs_logratio_max"] == 4
    assert found["seq_abs_logratio_mean"] == 2
    assert found["abs_logratio_max"] == 2
    assert found["extreme_5"] == 0.5
    assert found["ess"] == near((exp(2) + exp(-2) + 2) ** 2 / (4 * (exp(4) + exp(-4) + 2)))


def test_fault_15_the_small_side():
    """A ratio of exp(-7) is above no clip, and as far off as one of exp(7)."""
    found = of_ratios([0.0, -7.0]).metrics()
    assert found["ratio_fraction_high"] == 0
    assert found["ratio_fraction_low"] == 0.5
    assert found["extreme_10"] == 0.5
    assert found["logratio_min"] == -7
    assert found["ess"] == found["ess_truncated"] == near((1 + exp(-7)) ** 2 / (2 + 2 * exp(-14)))


@pytest.mark.parametrize("lr", [-199.0, -800.0])
def test_fault_16_equal_weights_below_float32_and_float64(lr):
    for rows in ([lr, lr], [[lr], [lr]]):
        found = of_ratios(rows).metrics()
        assert found["ess"] == found["ess_truncated"] == 1
        assert found["ess_sequence"] == found["ess_sequence_truncated"] == 1
        assert found["kl_k3"] == -lr - 1  # and exp(lr), which is less than its rounding
        assert found["abs_logratio_p99"] == -lr
    assert of_ratios([lr, lr]).metrics()["seq_logratio_abs_max"] == -2 * lr


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_fault_17_no_tokens(shape):
    none = np.zeros(shape)
    no_figures(LogprobMismatch.of(none, none, strict=True))
    no_figures(LogprobMismatch.of(torch.zeros(shape), torch.zeros(shape), mask=none))
    assert state(LogprobMismatch.of(none, none)) == state(LogprobMismatch.zero())
    if shape == (0,):  # a rank without sequences
        no_figures(LogprobMismatch.of(none, none, cu_seqlens=[0]))


class Elsewhere:
    """A tensor of a device that has no float64, and of which numpy can see nothing"""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def detach(self) -> Elsewhere:
        return self

    def cpu(self) -> torch.Tensor:
        return self.values

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_fault_18_tensors_of_other_devices():
    """There: a sum was made on the CPU of values on a GPU. Here values come to the CPU first.

    Not run on a GPU here: shown with a stand-in for one, and torch's device without values.
    """
    t, s = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -2.0, -1.0])
    bounds, mask = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1])
    found = LogprobMismatch.of(
        Elsewhere(t), Elsewhere(s), cu_seqlens=Elsewhere(bounds), mask=Elsewhere(mask)
    )
    assert state(found) == state(LogprobMismatch.of(t, s, cu_seqlens=bounds, mask=mask))
    with pytest.raises(TraceError, match=r"log-probabilities \(trainer\): .* cannot be read"):
        LogprobMismatch.of(t.to("meta"), s)
    with pytest.raises(TraceError, match=r"mask: .* cannot be read"):
        LogprobMismatch.of(t, s, mask=mask.to("meta"))


def test_fault_19_the_first_sequence_of_two_ranks_is_two_sequences():
    """There: ids that two ranks use alike became one sequence."""
    a, b = of_ratios([[1.0, 0.5]]), of_ratios([[-1.0, 0.25]])
    found = (a + b).metrics()
    assert found["sequences"] == 2
    assert found["seq_logratio_abs_max"] == 1.5
    assert found["seq_logratio_abs_mean"] == (1.5 + 0.75) / 2
    assert found["chi2_seq"] == near((exp(3) + exp(-1.5)) / 2 - 1)
    assert state(a + b) == state(of_ratios([[1.0, 0.5], [-1.0, 0.25]]))
