"""What a comparison means: is routing the problem, does replay work, how bad are the tails.

Rules over the figures of a comparison document (r3.comparison), each with what to look at next.
They judge one capture. Trends over training steps are alerts, see r3.alerts, whose limits are used
here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from r3.alerts import AlertLimits

LEVELS = ("good", "notice", "bad")
# Replay that removes less of the KL than this shows that most of it has another cause.
_MAIN_CAUSE = 0.5
# Where nearly all tokens have a differing layer, their share of the KL says nothing.
_NEARLY_ALL = 0.8


@dataclass(frozen=True)
class Finding:
    """level: one of LEVELS. title: what is so. text: the figures. look_at: what to do next."""

    level: str
    title: str
    text: str
    look_at: str = ""


def judge(document: Mapping[str, Any], limits: AlertLimits | None = None) -> dict[str, Any]:
    """The block "verdict" of a document in which None is what is not known: the worst level, and
    findings, the worst first."""
    limits = limits or AlertLimits()
    # what is compared with something else says nothing
    findings = list(_misplaced(document, limits))
    rules = (_replay, _cause, _tails, _weights, _odd) if not findings else ()
    findings += [f for rule in (*rules, _lost, _alerts) for f in rule(document, limits)]
    findings.sort(key=lambda f: -LEVELS.index(f.level))
    level = findings[0].level if findings else "notice"
    return {"level": level, "findings": [asdict(f) for f in findings]}


_WHERE = {-1: "the token before", 1: "the token behind"}


def _misplaced(d: Mapping[str, Any], limits: AlertLimits) -> Iterator[Finding]:
    alignment, shift = d.get("alignment"), d.get("logprob_shift")
    if shift:
        yield Finding(
            "bad",
            "The log-probabilities are shifted",
            f"those of the second side correlate with the first side's of {_WHERE[shift['shift']]} "
            f"({shift['correlation']:.2f}) and not with those of the same token "
            f"({shift['correlation_at_0']:.2f})",
            "entry i must be the log-probability of token i, which the pass of token i - 1 gave; "
            "no other figure here means anything before this is mended",
        )
    if alignment and alignment["fault"]:
        yield Finding(
            "bad",
            "The recorded rows do not stand where they belong",
            alignment["text"],
            "what was compared with what: offsets of tokens or layers, the rollout ids, the "
            "weights; no other figure here means anything before this is mended",
        )


def _replay(d: Mapping[str, Any], limits: AlertLimits) -> Iterator[Finding]:
    found = d["routing"]["replay"]
    if not found or not found["rows"]:
        return
    cells = found["rows"] * len(found["layers"])
    if found["cell_disagreement"] == 0:
        yield Finding(
            "good",
            "Replay works",
            f"All {cells:,} cells used the experts that the engine had used",
        )
        return
    layers = [x["layer"] for x in found["layers"] if x["cell_disagreement"]]
    yield Finding(
        "bad",
        "Replay did not take effect everywhere",
        f"{_percent(found['cell_disagreement'])} of the cells used other experts than the engine, "
        f"in layers {_some(layers)}",
        "MegatronReplay.report(): rows_missing, rows_stale, rows_not_enclosed; which layers",
    )


def _cause(d: Mapping[str, Any], limits: AlertLimits) -> Iterator[Finding]:
    found, shares = d["routing"]["native"], d.get("attribution")
    if not found or not found["rows"]:
        return
    differs = found["cell_disagreement"]
    if differs == 0:
        yield Finding(
            "good",
            "Routing is not the problem",
            "Both sides chose the same experts in all cells",
            "what remains is arithmetic: dtypes, kernels, the LM head, sampled against reported "
            "log-probabilities",
        )
        return
    routed = (
        f"{_percent(differs)} of the cells and {_percent(found['token_disagreement'])} of the "
        "tokens are routed differently"
    )
    removed = shares["kl_removed_by_replay"] if shares else None
    if removed is not None:
        if removed >= _MAIN_CAUSE:
            title, level = "Routing is the main part of the mismatch, and replay removes it", "good"
            more = ""
        else:
            title, level = "Routing is not the main part of the mismatch", "notice"
            more = "dtypes, kernels, the LM head, sampled against reported log-probabilities"
        text = f"{routed}; replay removes {_percent(removed)} of the KL"
        yield Finding(level, title, text, more)
        return
    if not shares or shares["kl_share_differing"] is None:
        block = d["mismatch"]["native"]
        more, look_at = "", "whether it matters only log-probabilities of both sides can tell"
        if block and block["metrics"]["abs_logratio_max"] == 0:
            more = "; their log-probabilities are the same"
            look_at = "how log-probabilities can be the same where routes are not"
        elif block:
            more, look_at = "; the KL is beyond float64", "the worst tokens"
        yield Finding("notice", "Engine and trainer route differently", routed + more, look_at)
        return
    held, of = shares["kl_share_differing"], shares["token_share_differing"]
    text = (
        f"{routed}; the passes that differ produced {_percent(of)} of the sampled tokens and hold "
        f"{_percent(held)} of the KL"
    )
    if of > _NEARLY_ALL:
        title = "Whether routing is the problem only replay can tell"
    elif held >= _MAIN_CAUSE:
        kl = d["mismatch"]["native"]["metrics"]["kl_k3"]
        small = kl is not None and kl < limits.kl
        title = f"Routing is likely the main part of {'a small' if small else 'the'} mismatch"
    else:
        title = "Most of the mismatch sits in tokens that are routed alike"
    yield Finding("notice", title, text, "the same with replay: `r3 compare A B --replay C`")


def _tails(d: Mapping[str, Any], limits: AlertLimits) -> Iterator[Finding]:
    side, m = _trained_with(d)
    if not m or not m["tokens"]:
        return
    extreme, most = m["extreme_2"], m["abs_logratio_max"]
    kl = "beyond float64" if m["kl_k3"] is None else f"{m['kl_k3']:.2e}"
    level = "good"
    if extreme > limits.extreme_tokens_bad:
        level = "bad"
    elif extreme > limits.extreme_tokens or most > limits.abs_logratio:
        level = "notice"
    titles = {
        "good": "The tails are short",
        "notice": "Some tokens are far off",
        "bad": "So many extreme tokens have come before a collapse",
    }
    yield Finding(
        level,
        titles[level],
        f"{side}: the ratio of {_percent(extreme)} of {m['tokens']:,} sampled tokens is beyond 2, "
        f"KL k3 {kl}, largest |log-ratio| {most:.3g}",
        "" if level == "good" else "worst tokens and rollouts, slices by length, turn and lag",
    )


def _weights(d: Mapping[str, Any], limits: AlertLimits) -> Iterator[Finding]:
    side, m = _trained_with(d)
    if not m or not m["tokens"]:
        return
    low = {k: m[k] for k in ("ess", "ess_sequence") if m[k] is not None and m[k] < limits.ess}
    # one sequence says nothing of how weights are spread over sequences
    if m["sequences"] < 2:
        low.pop("ess_sequence", None)
    if low:
        names = {"ess": "tokens", "ess_sequence": "sequences"}
        shown = ", ".join(f"{x:.2f} over {names[k]}" for k, x in low.items())
        yield Finding(
            "notice",
            "Few tokens or sequences carry most of the weight",
            f"{side}: normalized effective sample size {shown}",
            "resynchronize the engine's weights rather than correct harder; length of rollouts, "
            "as sequence weights are products over tokens",
        )


def _odd(d: Mapping[str, Any], limits: AlertLimits) -> Iterator[Finding]:
    for side in ("native", "replay"):
        block = d["mismatch"][side]
        lost = {k: n for k, n in (block or {}).get("left_out", {}).items() if n}
        if lost:
            kinds = ", ".join(f"{n:,} {k.replace('_', ' ')}" for k, n in lost.items())
            yield Finding(
                "notice",
                "Log-probabilities that cannot be",
                f"Left out, {side}: {kinds}",
                f"the first: {'; '.join(block['examples'][:2])}",
            )
    modes = [
        x for x, _ in ((d["files"].get("a") or {}).get("provenance") or {}).get("logprobs_mode", [])
    ]
    raw = [str(mode) for mode in modes if str(mode).startswith("raw")]
    if raw:
        yield Finding(
            "notice",
            "The engine reported other log-probabilities than it sampled from",
            f"logprobs_mode is {raw[0]}",
            'vLLM\'s logprobs_mode="processed_logprobs"',
        )


def _lost(d: Mapping[str, Any], limits: AlertLimits) -> Iterator[Finding]:
    found = d["routing"]["native"]
    if found:
        lost = found["rows_left_out"]
        share = lost / max(lost + found["rows"], 1)
        if share > limits.rows_without_route:
            yield Finding(
                "bad" if not found["rows"] else "notice",
                "Rows without a route",
                f"{lost:,} rows ({_percent(share)}) have no route on one side and count nowhere",
                "`r3 inspect` on both files; prefix caching, KV from elsewhere, preemption",
            )
        if not found["rows"] and not lost:
            yield Finding("notice", "No routing could be compared", "no rollout has a row")
    bare = {
        f["name"]: f["rollouts"] - f["with_logprobs"]
        for f in d["files"].values()
        if f and f["with_logprobs"] < f["rollouts"]
    }
    if bare:
        counts = ", ".join(f"{n:,} of {name}" for name, n in bare.items())
        yield Finding(
            "notice",
            "Rollouts without log-probabilities",
            f"{counts}; of these only routing was compared",
        )
    pairs = d.get("pairs") or {}
    lacking = {
        "only in the first file": pairs.get("only_a"),
        "only in the second": pairs.get("only_b"),
        "not in the third": pairs.get("not_in_c"),
    }
    if any(lacking.values()):
        counts = ", ".join(f"{n:,} {where}" for where, n in lacking.items() if n)
        yield Finding(
            "notice",
            "Rollouts without a counterpart",
            f"{counts}; {pairs['rollouts']:,} compared",
        )


def _alerts(d: Mapping[str, Any], limits: AlertLimits) -> Iterator[Finding]:
    """One finding for each kind of alert in the recorded steps"""
    steps = d.get("steps") or []
    found: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for i, step in enumerate(steps):
        for alert in step.get("alerts") or ():
            found.setdefault(alert["name"], []).append((i, alert))
    for name, raised in found.items():
        last, alert = raised[-1]
        when = f"In {len(raised)} of {len(steps)} steps, last in" if len(steps) > 1 else "In"
        yield Finding(
            alert["level"] if last == len(steps) - 1 else "notice",
            f"Alert of recorded steps: {name.replace('_', ' ')}",
            f"{when} step {steps[last]['step']}: {alert['message']}",
            alert["look_at"],
        )


def _trained_with(d: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """The metrics of what training sees: under replay where there is replay"""
    side = "replay" if d["mismatch"]["replay"] else "native"
    block = d["mismatch"][side]
    names = {"native": "Without replay", "replay": "With replay"}
    return names[side], block["metrics"] if block else None


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _some(items: list[Any]) -> str:
    shown = ", ".join(map(str, items[:8]))
    return f"{shown}, ..." if len(items) > 8 else shown
