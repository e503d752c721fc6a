"""The page's colours where a browser does not know light-dark() (before 2024)."""

from __future__ import annotations

import re

_COLORS = re.compile(r"(--[\w-]+): light-dark\((#\w+), (#\w+)\)")


def without_light_dark(css: str) -> str:
    """`css`, and behind it the same colours said in the old way for such browsers."""
    found = _COLORS.findall(css)
    light, dark = (";".join(f"{x[0]}:{x[side]}" for x in found) for side in (1, 2))
    return f"""{css}
@supports not (color: light-dark(#000, #fff)) {{
  :root {{ {light} }}
  @media screen {{ :root[data-theme="dark"] {{ {dark} }} }}
  @media screen and (prefers-color-scheme: dark) {{
    :root:not([data-theme="light"]) {{ {dark} }}
  }}
}}
"""
