"""One HTML file that says whether routing is the problem, whether replay helps, and where it hurts.

The page needs nothing but itself: no script, font or picture is loaded, and its policy forbids it.
What comes from the document (rollout names, token text, provenance) is text and never markup.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from r3.errors import MissingDependencyError
from r3.page import experts, glossary, heatmap, overview, routing, slices, steps, tokens
from r3.page.numbers import number, share, visible
from r3.page.reach import at, mapping, records
from r3.page.theme import without_light_dark
from r3.page.words import TERMS
from r3.plain import plain

__all__ = ["check_installed", "render_page"]


def check_installed() -> None:
    """Raise MissingDependencyError, naming the extra `report`, without jinja2 or matplotlib."""
    for module in ("jinja2", "matplotlib"):
        try:
            missing = importlib.util.find_spec(module) is None
        except ValueError:  # a module that was put aside
            missing = True
        if missing:
            raise MissingDependencyError(
                f"the page needs {module}: pip install 'rollout-routing-replay[report]'"
            )


def render_page(data: Mapping[str, Any]) -> str:
    """HTML of a comparison document (format `r3-comparison/1`, what `r3 compare --json` prints).

    Anything in it may be null or missing; what is not there is left out of the page. The whole
    document is embedded as JSON (`<script id="data">`), not-finite numbers as null. Raises
    MissingDependencyError, naming the extra `report`, without jinja2 or matplotlib.
    """
    check_installed()
    import jinja2
    from markupsafe import Markup

    here = files("r3.page")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "share": share,
        "visible": visible,
        "svg": Markup,  # charts only: r3.page.charts, whose text matplotlib escapes
    }
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    page = template.render(
        **_context(data),
        css=Markup(without_light_dark(here.joinpath("page.css").read_text(encoding="utf-8"))),
        js=Markup(here.joinpath("page.js").read_text(encoding="utf-8")),
        document=Markup(_embedded(data)),
    )
    # half of a surrogate pair in token text cannot be written as UTF-8
    return page.encode("utf-8", "replace").decode("utf-8")


def _context(data: Mapping[str, Any]) -> dict[str, Any]:
    context: dict[str, Any] = {
        "verdict": overview.verdict(data),
        "figures": overview.figures(data),
        "metrics": overview.all_metrics(data),
        "sources": overview.sources(data),
        "steps": steps.steps(data),
        "heat": heatmap.heat_map(data),
        "by_layer": routing.by_layer(data),
        "by_position": routing.by_position(data),
        "depth": routing.depth(data),
        "sequences": routing.sequences(data),
        "margins": routing.margins(data),
        "swaps": routing.swaps(data),
        "outside": routing.outside(data),
        "max_vio": experts.max_vio(data),
        "load": experts.load(data),
        "tails": tokens.tails(data),
        "attribution": tokens.attribution(data),
        "probability": tokens.probability(data),
        "slices": slices.slices(data),
        "compared_slices": bool(mapping(data, "slices")),
        "rollouts": tokens.rollouts(data),
        "tokens": tokens.worst_tokens(data),
        "has": {
            block: {side: bool(mapping(data, block, side)) for side in overview.SIDES}
            for block in ("routing", "mismatch")
        },
        "rows": {
            side: {k: at(data, "routing", side, k) for k in ("rows", "rows_left_out")}
            for side in overview.SIDES
        },
        "compared": _compared(data),
        "terms": glossary.terms(data),
        "outside_means": TERMS["outside_topk"][1],
        "titles": glossary.titles(data),
    }
    context["replay"] = any(sides["replay"] for sides in context["has"].values())
    present = {
        "figures": any(x for sides in context["has"].values() for x in sides.values()),
        "steps": context["steps"],
        "where": context["has"]["routing"]["native"] or context["has"]["routing"]["replay"],
        "tails": context["tails"],
        "attribution": context["attribution"],
        "rollouts": context["rollouts"],
        "tokens": context["tokens"],
        "slices": context["slices"],
        "probability": context["probability"],
        "margins": context["has"]["routing"]["native"],
        "experts": context["max_vio"] or context["load"] or context["swaps"],
        "outside": context["outside"],
        "sources": True,
        "reading": True,
    }
    order = list(present)
    trend = bool(context["steps"]) and context["steps"]["count"] > 1
    if not trend:  # what was compared comes first
        order.remove("steps")
        order.insert(order.index("tokens") + 1, "steps")
    return context | {"trend": trend, "present": {k: bool(present[k]) for k in order}}


def _compared(data: Mapping[str, Any]) -> list[str]:
    """What the page is about, as a few short phrases."""
    pairs, spec = mapping(data, "pairs"), mapping(data, "spec")
    phrases = []
    if pairs.get("rollouts") is not None:
        phrases.append(f"{number(pairs['rollouts'])} rollouts")
    if pairs.get("tokens") is not None:
        sampled = pairs.get("sampled_tokens")
        extra = "" if sampled is None else f" ({number(sampled)} sampled)"
        phrases.append(f"{number(pairs['tokens'])} tokens{extra}")
    layers = spec.get("moe_layers")
    if isinstance(layers, list):
        phrases.append(f"{len(layers)} MoE layers")
    if spec.get("top_k") is not None and spec.get("num_experts") is not None:
        phrases.append(f"{spec['top_k']} of {spec['num_experts']} experts")
    run = len(records(data, "steps"))
    if run:
        phrases.append(f"{run:,} recorded steps" if run > 1 else "1 recorded step")
    return phrases


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that a script element can hold: no markup in it, nothing outside ASCII."""
    text = json.dumps(plain(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
