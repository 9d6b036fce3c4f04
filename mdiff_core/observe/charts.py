"""Charts as SVG text: no plotting library, no scripts, and colours that follow the reader's light or dark setting."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 520.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 14.0, 30.0
COLOURS = 6
"""Number of `--c1` ... variables that the page's style defines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values laid on pixels `start`..`end` (start > end for a vertical axis)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        at, low, high = (
            (math.log10(v) for v in (value, self.low, self.high)) if self.log else (value, self.low, self.high)
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values within the range; decades on a log axis."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            every = max(1, math.ceil((last - first + 1) / most))
            return [10.0**power for power in range(first, last + 1, every)]
        step = nice_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice_step(rough: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def short(value: float) -> str:
    """A number as a person writes it on an axis."""
    if value != 0 and (abs(value) >= 1e5 or abs(value) < 1e-4):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{round(value, 6):g}"


def spread(values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """A range around the values with a little room; never empty."""
    low, high = min(values), max(values)
    if log:
        return 10.0 ** math.floor(math.log10(low) - 0.05), 10.0 ** math.ceil(math.log10(high) + 0.05)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def lines(series: Mapping[str, Sequence[Point]], *, title: str = "", log: bool = False) -> str:
    """One line per name through its finite (x, y) points; on a log scale only positive y count. Empty text: a note."""
    usable: Callable[[float], bool] = (lambda y: math.isfinite(y) and y > 0) if log else math.isfinite
    drawn = {name: [(float(x), float(y)) for x, y in points if usable(y)] for name, points in series.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return figure(title, '<p class="quiet">no values</p>', ())
    every = [point for points in drawn.values() for point in points]
    low, high = spread([x for x, _ in every])
    x_axis = Axis(low=low, high=high, start=LEFT, end=WIDTH - RIGHT)
    low, high = spread([y for _, y in every], log=log)
    y_axis = Axis(low=low, high=high, start=HEIGHT - BOTTOM, end=TOP, log=log)
    whole = all(x.is_integer() for x, _ in every)
    body = grid(x_axis, y_axis, whole=whole)
    body += "".join(_line(name, points, x_axis, y_axis, index) for index, (name, points) in enumerate(drawn.items()))
    return figure(title, svg(body, title), tuple(drawn) if len(series) > 1 else ())


def _line(name: str, points: Sequence[Point], x_axis: Axis, y_axis: Axis, index: int) -> str:
    colour = f"var(--c{index % COLOURS + 1})"
    path = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in points)
    text = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
    if len(points) <= 80:
        text += "".join(
            f'<circle cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="3" fill="{colour}">'
            f"<title>{escape(name)} at {short(x)}: {y:.4g}</title></circle>"
            for x, y in points
        )
    return text


def stacked(bars: Sequence[tuple[str, Mapping[str, float]]], parts: Sequence[str], *, title: str = "") -> str:
    """A column per (label, part -> value), its parts stacked in the order of `parts`; a part keeps its colour."""
    totals = [sum(value for value in values.values()) for _, values in bars]
    if not bars or max(totals) <= 0:
        return figure(title, '<p class="quiet">no values</p>', ())
    x_axis = Axis(low=0, high=len(bars), start=LEFT, end=WIDTH - RIGHT)
    y_axis = Axis(low=0, high=max(totals) * 1.06, start=HEIGHT - BOTTOM, end=TOP)
    body = grid(x_axis, y_axis, x_labels=False)
    width = min(64.0, 0.72 * (x_axis(1) - x_axis(0)))
    every = math.ceil(len(bars) / 12)
    for index, (label, values) in enumerate(bars):
        middle = x_axis(index + 0.5)
        body += _column(label, values, parts, y_axis, middle - width / 2, width)
        if index % every == 0:
            body += f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(label)}</text>'
    return figure(title, svg(body, title), tuple(parts))


def _column(
    label: str, values: Mapping[str, float], parts: Sequence[str], y_axis: Axis, left: float, width: float
) -> str:
    text, bottom = "", 0.0
    for index, part in enumerate(parts):
        value = values.get(part, 0.0)
        top = y_axis(bottom + value)
        height = y_axis(bottom) - top
        text += (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="var(--c{index % COLOURS + 1})"><title>{escape(label)} {escape(part)}: {value:.1f} s</title></rect>'
        )
        bottom += value
    return text


def histogram(values: Sequence[float], *, title: str = "", bins: int = 20) -> str:
    """Counts of the finite values in equal bins; says how many were left out."""
    finite = [float(value) for value in values if math.isfinite(value)]
    missing = len(values) - len(finite)
    heading = f"{title} ({missing} not finite)" if missing else title
    if not finite:
        return figure(heading, '<p class="quiet">no values</p>', ())
    low, high = (min(finite), max(finite)) if min(finite) < max(finite) else spread(finite)
    counts = [0] * bins
    for value in finite:
        counts[min(bins - 1, int((value - low) / (high - low) * bins))] += 1
    x_axis = Axis(low=low, high=high, start=LEFT, end=WIDTH - RIGHT)
    y_axis = Axis(low=0, high=max(counts) * 1.06, start=HEIGHT - BOTTOM, end=TOP)
    body = grid(x_axis, y_axis, whole_y=True)
    width = (high - low) / bins
    for index, count in enumerate(counts):
        left, right = x_axis(low + index * width), x_axis(low + (index + 1) * width)
        body += (
            f'<rect x="{left + 0.5:.1f}" y="{y_axis(count):.1f}" width="{right - left - 1:.1f}" '
            f'height="{y_axis(0) - y_axis(count):.1f}" fill="var(--c1)">'
            f"<title>{low + index * width:.3g} to {low + (index + 1) * width:.3g}: {count}</title></rect>"
        )
    return figure(heading, svg(body, heading), ())


def grid(x_axis: Axis, y_axis: Axis, *, whole: bool = False, whole_y: bool = False, x_labels: bool = True) -> str:
    """Horizontal rules with their values, and the values below; `whole` keeps integers only."""
    text = ""
    for value in y_axis.ticks():
        if whole_y and not float(value).is_integer():
            continue
        y = y_axis(value)
        text += f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--rule)"/>'
        text += f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>'
    for value in x_axis.ticks(8) if x_labels else ():
        if whole and not float(round(value, 6)).is_integer():
            continue
        text += f'<text x="{x_axis(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{short(value)}</text>'
    return text


def svg(body: str, label: str) -> str:
    """An image that scales with its column."""
    return f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(label)}">{body}</svg>'


def figure(title: str, body: str, names: Sequence[str]) -> str:
    """A titled chart with a legend of `names` in colour order."""
    keys = "".join(
        f'<span><i style="background:var(--c{i % COLOURS + 1})"></i>{escape(n)}</span>' for i, n in enumerate(names)
    )
    legend = f'<span class="legend">{keys}</span>' if names else ""
    heading = f"<figcaption>{escape(title)}{legend}</figcaption>" if title or names else ""
    return f"<figure>{heading}{body}</figure>"
