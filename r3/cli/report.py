"""The demo's page: the numbers of summary.json and one picture, in a file of its own."""

from __future__ import annotations

import io
from importlib.resources import files
from typing import Any


def render_report(summary: dict[str, Any]) -> str:
    """HTML without external references. `summary` is that of `r3 demo`."""
    import jinja2

    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        files("r3.cli").joinpath("report.html").read_text(encoding="utf-8")
    )
    return template.render(s=summary, picture=_disagreement_svg(summary))


def _disagreement_svg(summary: dict[str, Any]) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    native = summary["cell_disagreement_per_layer_native"]
    replay = summary["cell_disagreement_per_layer_replay"]
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.subplots()
    layers = [int(x) for x in native]
    axes.bar(layers, [100 * x for x in native.values()], width=0.7, label="native", color="#c2410c")
    axes.plot(
        layers, [100 * x for x in replay.values()], "o", ms=4, label="replay", color="#1d4ed8"
    )
    axes.set_xlabel("decoder layer")
    axes.set_ylabel("cells routed differently (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=min(0, -0.02 * axes.get_ylim()[1]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "r3"}):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
