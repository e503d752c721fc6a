"""Writing a chart as SVG that takes its colours and its font from the page.

Matplotlib draws with stand-in colours, which are then replaced by CSS variables: one picture fits
the light and the dark theme. Ids are made unique over the page; nothing refers outside it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from r3.errors import MissingDependencyError

# stand-ins: colours that nothing else is drawn in
VARIABLES = {
    name: f"#0102{i:02x}"
    for i, name in enumerate(("ink", "muted", "line", "native", "replay", "bad", "extra"))
}


def write_svg(
    name: str, paint: Callable[[Any], None], size: tuple[float, float], top: float
) -> str:
    """What `paint` draws into axes. name: unique on the page. size: width and height in inches,
    to which `top` inches for title and legend are added.

    Raises MissingDependencyError without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "the page needs matplotlib: pip install 'rollout-routing-replay[report]'"
        ) from None
    colors = VARIABLES
    style: dict[str, Any] = {
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
        "axes.linewidth": 0.8,
        "legend.frameon": False,
        "legend.labelcolor": colors["ink"],
        "legend.handlelength": 2.4,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "text.color": colors["ink"],
        "axes.titlecolor": colors["ink"],
        "axes.labelcolor": colors["ink"],
        "xtick.color": colors["muted"],
        "ytick.color": colors["muted"],
        "axes.edgecolor": colors["muted"],
        "grid.color": colors["line"],
    }
    text = io.StringIO()
    with matplotlib.rc_context(style):
        wide, high = size[0], size[1] + top
        figure = Figure(figsize=(wide, high))
        axes = figure.subplots()
        # fixed, as the fonts of the reader are not known here; and three times as fast as a layout
        figure.subplots_adjust(0.62 / wide, 0.5 / high, 1 - 0.12 / wide, 1 - top / high)
        paint(axes)
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    return _for_page(text.getvalue(), name)


def _for_page(svg: str, name: str) -> str:
    """Inline SVG: no XML head, no metadata, own ids, the page's colours, size and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href").replace(' type="text/css"', "")
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.S)  # only line joins, set in page.css
    svg = re.sub(r"<defs>\s*</defs>\s*", "", svg)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))

    def own(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in used else ""

    svg = re.sub(r' id="([^"]*)"', own, svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{name}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]+; ", "", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)
    for variable, color in VARIABLES.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg
