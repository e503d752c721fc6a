"""Captured rows against Hugging Face through everything that moves tokens about in vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from routing_check import Counts, check_lengths, check_routing, read_traces
from scenario_play import play
from scenarios import KINDS, Scenario, scenario
from tiny_models import MOE_FAMILIES, make_draft

# few engines, since each takes long to start; together they cover every kind and family
SMALL = (
    ("gpt_oss", {"chunked", "prefix", "preemption", "samples"}),
    ("wide", {"multiprocess", "prefix", "preemption", "stops", "aborts", "sleep", "resets"}),
    ("qwen3_moe", {"compiled", "ngram", "prefix", "chunked", "priority"}),
    ("qwen3_moe", {"draft", "preemption", "stops", "samples", "aborts"}),
    ("mixtral", {"tensor_parallel", "chunked", "preemption"}),
    ("glm4_moe", {"async", "chunked", "prefix", "aborts", "preemption", "priority"}),
)
FULL_SEEDS, FULL_REQUESTS = range(24), 64


def run(s: Scenario, model_dir: Callable, run_engine: Callable, folder: Path) -> tuple[Any, Counts]:
    """Counts of what happened in a scenario, and of its cells, all of which were right."""
    model, draft, file = model_dir(s.family), None, folder / "routing.r3"
    if "draft" in s.kinds:
        draft = make_draft(model, folder / "draft")
    result = run_engine(play, scenario=s, model=model, draft=draft, file=file)
    traces = read_traces(file)
    check_lengths(traces, result["facts"])
    counts = check_routing(traces, model)
    print(f"\n{s}: {counts}; {result['counts']}", flush=True)  # pytest -s
    for kind in s.kinds:
        assert result["counts"][kind] > 0, f"{kind} did not happen"
    if s.kinds & {"ngram", "draft"}:
        assert result["counts"]["rejected drafts"] > 0
    return result["counts"], counts


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kinds"), SMALL, ids=lambda v: v if isinstance(v, str) else "")
def test_rows_are_right_in_every_kind_of_scenario(family, kinds, model_dir, run_engine, tmp_path):
    """Each kind once, small; that it took place is asserted, and that a shift would be seen."""
    s = scenario(1, kinds, family, requests=14, turns=2)
    if "chunked" in kinds:  # so few requests must not fit into their passes
        s = replace(s, max_num_batched_tokens=64)
    _, counts = run(s, model_dir, run_engine, tmp_path)
    assert counts.cells >= 3_000
    assert counts.excused <= 0.02 * counts.cells
    assert counts.shifted > 0.1 * counts.cells, "a capture shifted by one row would have passed"


def test_the_small_scenarios_leave_nothing_out():
    assert set().union(*(kinds for _, kinds in SMALL)) == set(KINDS)
    assert {family for family, _ in SMALL} == set(MOE_FAMILIES)


def test_a_scenario_follows_from_its_seed():
    assert scenario(5) == scenario(5)
    assert len({str(scenario(seed)) for seed in FULL_SEEDS}) == len(FULL_SEEDS)
    drawn = [scenario(seed).kinds for seed in FULL_SEEDS]
    assert set().union(*drawn) == set(KINDS)


@pytest.mark.full
def test_a_million_cells(model_dir, run_engine, tmp_path):
    """Families in turn, everything else drawn: no gap, no wrong length, no wrong cell."""
    total, seen = Counts(), Counter()
    for seed in FULL_SEEDS:
        family = MOE_FAMILIES[seed % len(MOE_FAMILIES)]
        s = scenario(seed, family=family, requests=FULL_REQUESTS)
        folder = tmp_path / str(seed)
        folder.mkdir()
        happened, counts = run(s, model_dir, run_engine, folder)
        total, seen = total + counts, seen + Counter(happened)
    print(
        f"\nin all: {total}; {seen['preemption']} preemptions, {seen['rejected drafts']} rejected "
        f"drafts, {seen['aborts']} aborts, {seen['prefix']} tokens from the prefix cache"
    )
    assert total.cells >= 1_000_000
    assert total.excused <= 0.01 * total.cells
    assert total.shifted > 0.2 * total.cells
    assert seen["preemption"] >= 200
