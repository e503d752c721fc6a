"""What binding to a loaded model and the self-test refuse, in the real vLLM."""

from __future__ import annotations

import re

import pytest

import start_runs

pytestmark = pytest.mark.slow


def test_27_faults_are_refused_at_start(model_dir, run_engine):
    """Kernels that route inside, unknown routers, layers that stay silent or constant, by name."""
    found = run_engine(start_runs.start_refusals, model=model_dir("qwen3_moe"))
    assert found.pop("good") == found.pop("good self-test") == "accepted"
    silent = r"CaptureError: layer 2: the router did not report \d+ rows, once"
    expected = {
        "monolithic": "UnsupportedError: layer 1: .* routes inside its kernel",
        "unknown router": "UnsupportedError: layer 2: .*with object routes inside its kernel",
        "other layers": r"UnsupportedError: .*routers in layers \(1, 2, 3\), expected \(0, 1, 2\)",
        "other top_k": "UnsupportedError: layer 1: router chooses 4 of 16 experts, expected 3",
        "constant layer": "UnsupportedError: self-test .*layer 2: all rows are",
        "silent layer": silent,
        "layer in two chunks": silent,
        "layer one row short": silent,
        "no full attention": "UnsupportedError: .*full-attention group",
    }
    assert set(found) == set(expected)
    for name, pattern in expected.items():
        assert re.match(pattern, found[name]), (name, found[name])


def test_capture_does_not_change_what_is_sampled(model_dir, run_engine):
    """The self-test leaves the random state as vLLM seeded it."""
    model = model_dir("qwen3_moe")
    on, off = (run_engine(start_runs.sampled, model=model, capture=c) for c in (True, False))
    assert on == off
    assert len({tuple(tokens) for tokens in on}) == 8
