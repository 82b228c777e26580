# SPDX-License-Identifier: Apache-2.0
"""Panels of a Grafana dashboard as one SVG, on Grafana's grid of 24 columns."""

import datetime
import html
import math

COLUMN, ROW, GAP, EDGE = 66, 31, 8, 16  # pixels
HEAD = 52
PALETTE = ["#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2",
           "#b877d9", "#705da0", "#37872d", "#fade2a"]
TEXT, DIM, GRID = "#ccccdc", "#8e8e9a", "#2c2f36"
CHARACTER = 6.2  # pixels, of text at 11
LEGEND_ROWS = 4


def si(value: float, suffix: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{suffix}".rstrip()
    return f"{value:.3g} {suffix}".rstrip()


def seconds(value: float) -> str:
    if value == 0 or value >= 1:
        return f"{value:.3g} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs"


def binary(value: float) -> str:
    for factor, prefix in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}B"
    return f"{value:.3g} B"


FORMATS = {
    "s": seconds,
    "bytes": binary,
    "percentunit": lambda value: f"{value * 100:.3g} %",
    "short": lambda value: si(value, ""),
    "reqps": lambda value: f"{value:.3g} req/s",
    "ops": lambda value: si(value, "ops/s"),
    "Bps": lambda value: si(value, "B/s"),
    "flops": lambda value: si(value, "FLOP/s"),
}


def ticks(top: float, unit: str) -> list[float]:
    """Zero to at least top, in up to five round steps."""
    if top <= 0:
        return [0, 1]
    if unit == "bytes":
        step = 2.0 ** math.ceil(math.log2(top / 5))
    else:
        power = 10 ** math.floor(math.log10(top / 5))
        step = next(power * by for by in (1, 2, 2.5, 5, 10) if top <= 5 * power * by)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def text(x: float, y: float, words: str, *, size: int = 11, color: str = DIM,
         anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{html.escape(words)}</text>')


def lay_out(lines: list[tuple], width: int) -> list[tuple[int, float]]:
    """Row and offset of each name, as many as fit LEGEND_ROWS."""
    places, row, at = [], 0, 0.0
    for name, _ in lines:
        wide = 22 + len(name) * CHARACTER
        if at > 0 and at + wide > width:
            row, at = row + 1, 0.0
        if row == LEGEND_ROWS:
            break
        places.append((row, at))
        at += wide
    return places


def draw_panel(panel: dict, events: list[tuple[float, str]], start: float,
               end: float, step: float) -> list[str]:
    grid = panel["gridPos"]
    x, y = EDGE + grid["x"] * COLUMN, HEAD + grid["y"] * ROW
    wide, high = grid["w"] * COLUMN - GAP, grid["h"] * ROW - GAP
    unit = panel["fieldConfig"]["defaults"]["unit"]
    lines, show = panel["lines"], FORMATS[unit]
    frame = (f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="3" '
             f'fill="#181b1f" stroke="#25282e"/>')
    parts = [frame, text(x + 10, y + 19, panel["title"], size=13, color=TEXT, bold=True)]
    names = lay_out(lines, wide - 20)
    names_top = y + high - 9 - 15 * max((row for row, _ in names), default=0)
    left, right = x + 76, x + wide - 12
    top, bottom = y + 32, names_top - 30
    scale = ticks(max((value for _, line in lines for _, value in line), default=0), unit)

    def across(at: float) -> float:
        return left + (at - start) / (end - start) * (right - left)

    def up(value: float) -> float:
        return bottom - value / scale[-1] * (bottom - top)

    for tick in scale:
        parts.append(f'<path d="M{left} {up(tick):.1f}H{right}" stroke="{GRID}"/>')
        parts.append(text(left - 6, up(tick) + 4, show(tick), anchor="end"))
    minute = math.ceil(start / 30) * 30
    for at in range(minute, int(end), 30):
        words = datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%H:%M:%S")
        if across(at) < right - 20:
            parts.append(text(across(at), bottom + 15, words, anchor="middle"))
    for at, _ in events:
        parts.append(f'<path d="M{across(at):.1f} {top}V{bottom}" stroke="#5794f2" '
                     'stroke-dasharray="3 3" opacity=".7"/>')
    for i, (_, line) in enumerate(lines):
        path, last = "", -math.inf
        for at, value in line:
            # As Grafana: no line where there was nothing.
            pen = "L" if at - last <= step else "M"
            path += f"{pen}{across(at):.0f} {up(value):.1f}"
            last = at
        parts.append(f'<path d="{path}" fill="none" stroke-width="1.5" '
                     f'stroke="{PALETTE[i % len(PALETTE)]}"/>')
    for i, (row, offset) in enumerate(names):
        at, line_y = x + 10 + offset, names_top + row * 15
        parts.append(f'<rect x="{at:.0f}" y="{line_y - 5}" width="12" height="3" '
                     f'rx="1" fill="{PALETTE[i % len(PALETTE)]}"/>')
        parts.append(text(at + 16, line_y, lines[i][0], color=TEXT))
    return parts


def draw(panels: list[dict], events: list[tuple[float, str]], start: float,
         end: float, step: float) -> str:
    """Times in seconds; `step`: between two points of a line."""
    width = 2 * EDGE + 24 * COLUMN - GAP
    height = HEAD + EDGE + ROW * max(
        panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    told = ", ".join(f"{at - start:.0f} s {what}" for at, what in events)
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="Inter, Helvetica, Arial, sans-serif">')
    parts = [
        head,
        f'<rect width="{width}" height="{height}" fill="#111217"/>',
        text(EDGE, 32, "Tandem", size=18, color=TEXT, bold=True),
        text(EDGE + 90, 32, f"{end - start:.0f} s of load; dashed: {told}", size=13),
    ]
    for panel in panels:
        if panel["type"] == "row":
            parts.append(text(EDGE + 4, HEAD + panel["gridPos"]["y"] * ROW + 20,
                              "⌄  " + panel["title"], size=14, color=TEXT, bold=True))
        else:
            parts += draw_panel(panel, events, start, end, step)
    return "\n".join([*parts, "</svg>", ""])
