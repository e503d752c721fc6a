"""What differing routes do to log-probabilities, and in which tokens and rollouts."""

# ruff: noqa: RUF001 (dashes, minus and times signs are meant)

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from r3.page.charts import Series, bar_chart, line_chart
from r3.page.numbers import NOTHING, edge, known, number, share, signed, tiny, visible, word
from r3.page.reach import aligned, at, items, mapping, records
from r3.page.tables import Column, Figure, figure, table

_SIDES = ("native", "replay")


def tails(data: Mapping[str, Any]) -> Figure | None:
    """Share of tokens beyond a log-ratio, before and after replay."""
    series: list[Series] = []
    rows: dict[float, dict[str, Any]] = {}
    for side in _SIDES:
        x = items(data, "mismatch", side, "survival", "thresholds")
        y = items(data, "mismatch", side, "survival", "share")
        if x:
            series.append(_tail(data, side, x, y))
        for u, v in zip(x, y, strict=False):
            if known(u) is not None:
                rows.setdefault(u, {"threshold": number(u)})[side] = v
    svg = line_chart(
        "tails",
        series,
        x="x = |log-ratio|",
        y="share of tokens beyond x",
        log="xy",
        lines=[(math.log(f), f"×{f:g}") for f in (1.1, 2, 10)],
        size=(5.6, 2.75),
    )
    beyond = [
        f"{s} {tiny(v)}"
        for s in _SIDES
        if known(v := at(data, "mismatch", s, "metrics", "extreme_2")) is not None
    ]
    said = f"Beyond a factor of 2: {', '.join(beyond)} of tokens." if beyond else ""
    return figure(
        svg,
        f"Share of tokens whose absolute log-ratio is beyond x, logarithmic axes. {said}",
        f"{said} A curve ends at the largest |log-ratio|, of one token. The dotted lines are "
        "probabilities apart by ×1.1, ×2 and ×10.",
        table(
            "Share of tokens beyond x",
            [
                Column("x = |log-ratio|", "threshold"),
                Column("native", "native", tiny),
                Column("replay", "replay", tiny),
            ],
            [rows[k] for k in sorted(rows)],
        ),
    )


def _tail(data: Mapping[str, Any], side: str, x: list[Any], y: list[Any]) -> Series:
    """A curve down to its end: the largest |log-ratio|, beyond which there is not a token."""
    metrics = mapping(data, "mismatch", side, "metrics")
    largest, tokens = known(metrics.get("abs_logratio_max")), known(metrics.get("tokens"))
    if not largest or not tokens:
        return Series(side, side, y, x)
    points = [
        (u, v)
        for a, b in zip(x, y, strict=False)
        if (u := known(a)) is not None and (v := known(b)) is not None and u < largest
    ]
    points.append((largest, 1 / tokens))
    return Series(side, side, [v for _, v in points], [u for u, _ in points], dots=[largest])


def attribution(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Share of tokens and of the KL, and size of log-ratios, by number of differing layers."""
    rows = records(data, "attribution", "by_layers")
    if not rows:
        return None
    names = [word(r.get("layers")) for r in rows]
    shares = bar_chart(
        "shares",
        names,
        [
            Series("tokens", "ink", [r.get("token_share") for r in rows]),
            Series("KL, native", "native", [r.get("kl_share_native") for r in rows]),
        ],
        x="differing layers of a token",
        y="share of the whole",
        percent="y",
    )
    sizes = bar_chart(
        "sizes",
        names,
        [Series(s, s, [r.get(f"abs_logratio_mean_{s}") for r in rows]) for s in _SIDES],
        x="differing layers of a token",
        y="mean |log-ratio|",
    )
    columns = [
        Column("differing layers", "layers"),
        Column("tokens", "tokens", number),
        Column("of all tokens", "token_share", share),
        Column("of the KL, native", "kl_share_native", share),
    ] + [
        Column(f"{word}, {s}", f"{key}_{s}", form)
        for word, key, form in (
            ("KL k3", "kl_k3", tiny),
            ("mean |lr|", "abs_logratio_mean", number),
            ("largest |lr|", "abs_logratio_max", number),
            ("F(2)", "extreme_2", tiny),
        )
        for s in _SIDES
    ]
    figures = [
        figure(
            shares,
            "Share of tokens and of the KL, by number of differing layers.",
            "Where the KL's bar is far above the tokens' bar, routing costs more than arithmetic.",
            None,
        ),
        figure(
            sizes,
            "Mean absolute log-ratio by number of differing layers, native and replay.",
            "Grouped by layers that differ natively, for both bars.",
            None,
        ),
    ]
    block = mapping(data, "attribution")
    held, removed = (known(block.get(f"kl_{k}")) for k in ("share_differing", "removed_by_replay"))
    return {
        "spreads": held is not None and removed is not None and removed > held,
        "figures": [f for f in figures if f],
        "table": table("By number of differing layers", columns, rows),
        "tokens": _share_or_none(block.get("token_share_differing")),
        "kl": _share_or_none(block.get("kl_share_differing")),
        "removed": _share_or_none(block.get("kl_removed_by_replay")),
    }


def _share_or_none(value: Any) -> str | None:
    return None if known(value) is None else share(value)


def probability(data: Mapping[str, Any]) -> list[Figure]:
    """Log-ratios by the probability of the token, as the engine and as the trainer saw it."""
    found = []
    for whose, key in (("engine", "sampler"), ("trainer", "trainer")):
        sides = {s: aligned(data, "mismatch", s, "buckets", key) for s in _SIDES}
        most = max(sides.values(), key=len)
        names = [f"{edge(b.get('low'))}–{edge(b.get('high'))}" for b in most]
        svg = bar_chart(
            f"prob{whose}",
            [edge(b.get("low")) for b in most],
            [Series(s, s, [b.get("abs_logratio_mean") for b in sides[s]]) for s in _SIDES],
            x=f"{whose}'s probability, from",
            y="mean |log-ratio|",
        )
        keys = [
            ("KL k3", "kl_k3", tiny),
            ("mean |lr|", "abs_logratio_mean", number),
            ("F(2)", "extreme_2", tiny),
        ]
        numbers = table(
            f"By {whose}'s probability",
            [Column("probability", "range"), Column("tokens", "tokens", number)]
            + [Column(f"{w}, {s}", f"{k}_{s}", f) for w, k, f in keys for s in _SIDES],
            [
                {"range": names[i], "tokens": b.get("tokens")}
                | {f"{k}_{s}": at(sides[s], i, k) for _, k, _ in keys for s in _SIDES}
                for i, b in enumerate(most)
            ],
        )
        made = figure(
            svg,
            f"Mean absolute log-ratio by the {whose}'s probability of the token.",
            f"By the {whose}'s probability.",
            numbers,
        )
        found += [made] if made else []
    return found


def rollouts(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The worst rollouts as a table; the script opens their tokens from the document."""
    whole = [known(at(data, "mismatch", "native", "metrics", k)) for k in ("kl_k3", "tokens")]
    kl = None if None in whole else math.prod(x or 0.0 for x in whole)
    # with its place in the document, where the script looks it up
    found = [
        (i, r | {"part": _part(r, kl)})
        for i, r in enumerate(items(data, "worst", "rollouts"))
        if isinstance(r, dict)
    ]
    sized = any(r["part"] is not None for _, r in found)
    if sized:
        found.sort(key=lambda x: -1.0 if x[1]["part"] is None else x[1]["part"], reverse=True)
    columns = [
        Column("rollout", "id"),
        Column("part of KL, native", "part", share),
        Column("tokens", "tokens", number),
        Column("sampled", "sampled_tokens", number),
        Column("cells differ", "cell_disagreement", share),
        Column("tokens differ", "token_disagreement", share),
    ] + [
        Column(f"{word}, {s}", f"{key}_{s}", form)
        for word, key, form in (
            ("KL k3", "kl_k3", tiny),
            ("largest |lr|", "abs_logratio_max", number),
            ("Σ lr", "seq_logratio", signed),
        )
        for s in _SIDES
    ]
    made = table("Worst rollouts", columns, [r for _, r in found], sortable=True)
    if made is None:
        return None
    return {
        "table": made,
        "sized": sized,
        "opens": [bool(items(r, "excerpt", "token_ids")) for _, r in found],
        "numbers": [i for i, _ in found],
        "replay": any(items(r, "excerpt", "logratio_replay") for _, r in found),
    }


def _part(rollout: Mapping[str, Any], kl: float | None) -> float | None:
    """The rollout's share of the sum of r - 1 - log r over all tokens."""
    mean, tokens = known(rollout.get("kl_k3_native")), known(rollout.get("sampled_tokens"))
    return mean * tokens / kl if kl and mean is not None and tokens is not None else None


def worst_tokens(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tokens with the largest log-ratio, with those around them."""
    rows = []
    for t in records(data, "worst", "tokens"):
        p = [known(t.get(f"{who}_logprob")) for who in ("sampler", "trainer")]
        rows.append(
            {
                "id": t.get("id") or NOTHING,
                "position": (number(t.get("position")), known(t.get("position"))),
                "token": _token(t.get("text"), t.get("token_id")),
                "probabilities": [
                    (number(math.exp(min(x, 0.0))) if x is not None else NOTHING, x) for x in p
                ],
                "native": (signed(t.get("logratio_native")), known(t.get("logratio_native"))),
                "replay": (signed(t.get("logratio_replay")), known(t.get("logratio_replay"))),
                "layers": (number(t.get("layers_differing")), known(t.get("layers_differing"))),
                "context": _context(t),
            }
        )
    return rows


def _token(text: Any, token_id: Any) -> str:
    return visible(text) if text is not None else word(token_id)


def _context(token: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Tokens around one, each with whether it is the one."""
    ids = items(token, "context", "token_ids")
    text = at(token, "context", "text")
    if isinstance(text, str):
        return [(visible(text), False)]
    start, position = known(at(token, "context", "start")), known(token.get("position"))
    marked = None if start is None or position is None else position - start
    joined = isinstance(text, list)
    return [
        (_token(at(text, i) if joined else None, one) + ("" if joined else " "), i == marked)
        for i, one in enumerate(ids)
    ]
