"""Documents that list what code has list all of it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from r3 import RouterSpec
from r3.disagreement import RoutingDisagreement
from r3.mismatch import LogprobMismatch

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_every_figure_is_explained():
    named = set(re.findall(r"`([^`]+)`", (DOCS / "metrics.md").read_text()))
    spec = RouterSpec(4, 1, (0,), 1)
    routing = RoutingDisagreement.zero(spec).to_dict()
    mismatch = LogprobMismatch.of(np.zeros(1), np.zeros(1))
    for figures in (routing, routing["layers"][0], mismatch.metrics()):
        assert set(figures) - {"layer"} <= named
