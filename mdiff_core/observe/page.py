"""What every piece of HTML shares: the style, images as data, tables. Pure functions to text."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from PIL import Image

THUMBNAIL = 256
"""Longest side of an embedded picture in pixels; larger ones are scaled down."""

STYLE = """<style>
.mdiff { --paper: #fff; --ink: #1c1f24; --quiet: #667080; --rule: #e4e7ec; --good: #1f7a4d; --bad: #a8324a;
  --c1: #2f6db3; --c2: #d2762c; --c3: #3f9169; --c4: #a9475d; --c5: #7c62ab; --c6: #8b929c;
  background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
@media (prefers-color-scheme: dark) { .mdiff { --paper: #15181d; --ink: #e3e6ea; --quiet: #96a0ae; --rule: #2c323a;
  --good: #64c795; --bad: #e58197; --c1: #6aa5e6; --c2: #e89a58; --c3: #6bc097; --c4: #d9798e; --c5: #ac95d9; --c6: #9aa2ad; } }
.mdiff * { box-sizing: border-box; }
.mdiff h1 { font-size: 26px; font-weight: 600; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
.mdiff h2 { font-size: 17px; font-weight: 600; margin: 44px 0 12px; }
.mdiff p { margin: 0 0 12px; max-width: 68ch; }
.mdiff .quiet, .mdiff figcaption, .mdiff svg text { color: var(--quiet); fill: var(--quiet); }
.mdiff code, .mdiff pre { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.mdiff pre { white-space: pre-wrap; margin: 0; }
.mdiff .tiles { display: flex; flex-wrap: wrap; gap: 10px 44px; margin: 24px 0 0; }
.mdiff .tiles b { display: block; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.mdiff .tiles span { color: var(--quiet); font-size: 13px; }
.mdiff .cards { display: grid; gap: 18px 16px; }
.mdiff .cards.one { grid-template-columns: repeat(auto-fill, minmax(116px, 1fr)); }
.mdiff .cards.two { grid-template-columns: repeat(auto-fill, minmax(222px, 1fr)); }
.mdiff .card { margin: 0; font-size: 13px; line-height: 1.35; }
.mdiff .card > div { display: flex; gap: 4px; margin-bottom: 6px; }
.mdiff .card img { flex: 1 1 0; width: 0; min-width: 0; border-radius: 3px; outline: 1px solid var(--rule); image-rendering: pixelated; }
.mdiff .card img.smooth { image-rendering: auto; }
.mdiff .card b { font-weight: 600; font-variant-numeric: tabular-nums; }
.mdiff .alarm { border-left: 4px solid var(--bad); padding: 8px 14px; margin: 18px 0 0; }
.mdiff .up { color: var(--good); } .mdiff .down { color: var(--bad); }
.mdiff .charts { display: grid; gap: 22px 32px; grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)); }
.mdiff figure { margin: 0; max-width: 620px; } .mdiff svg { display: block; width: 100%; height: auto; font-size: 12px; }
.mdiff figcaption { font-size: 13px; display: flex; justify-content: space-between; flex-wrap: wrap; gap: 2px 16px; }
.mdiff .legend { display: flex; flex-wrap: wrap; gap: 0 12px; }
.mdiff .legend i { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px; }
.mdiff .scroll { overflow: auto; max-height: 460px; }
.mdiff table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.mdiff th, .mdiff td { text-align: left; padding: 4px 18px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
.mdiff th { font-weight: 500; color: var(--quiet); position: sticky; top: 0; background: var(--paper); }
.mdiff td.n, .mdiff th.n { text-align: right; } .mdiff tbody th { position: static; white-space: nowrap; }
.mdiff summary { cursor: pointer; margin: 44px 0 12px; font-size: 17px; font-weight: 600; }
</style>"""


def fragment(body: str) -> str:
    """A piece that brings its own style, for a page we do not own."""
    return f'{STYLE}<div class="mdiff" style="padding:12px">{body}</div>'


def document(title: str, body: str) -> str:
    """A whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>{STYLE}</head>'
        '<body class="mdiff" style="margin:0"><main class="mdiff" style="max-width:1120px;margin:0 auto;padding:40px 28px 72px">'
        f"{body}</main></body></html>\n"
    )


def picture(frame: np.ndarray, alt: str) -> str:
    """An <img> with the pixels in it: frame [H, W, 3] uint8; small ones exact, large ones scaled down."""
    image = Image.fromarray(frame)
    small = max(image.size) <= THUMBNAIL // 2
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True) if small else image.save(data, "JPEG", quality=88)
    kind, shape = ("png", "") if small else ("jpeg", ' class="smooth"')
    text = base64.b64encode(data.getvalue()).decode()
    return f'<img{shape} alt="{escape(alt, quote=True)}" src="data:image/{kind};base64,{text}">'


def names_and_values(rows: Mapping[str, object]) -> str:
    """A table of two columns."""
    body = "".join(
        f"<tr><th>{escape(str(name))}</th><td>{escape(cell(value))}</td></tr>" for name, value in rows.items()
    )
    return f'<div class="scroll"><table><tbody>{body}</tbody></table></div>'


def columns(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a head; numbers are set to the right."""
    numeric = [all(isinstance(row[index], int | float) for row in rows) for index in range(len(heads))]
    marks = [' class="n"' if right else "" for right in numeric]
    head = "".join(f"<th{mark}>{escape(name)}</th>" for mark, name in zip(marks, heads, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{mark}>{escape(cell(value))}</td>" for mark, value in zip(marks, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(value: object) -> str:
    """Four significant digits for a fraction, anything else as it is."""
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"
    return str(value)
