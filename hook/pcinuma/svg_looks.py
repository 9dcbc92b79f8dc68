"""How the SVG of a picture looks: colours for light and dark, shapes, marks.

Text has at least 4.5:1 contrast on its ground in both (WCAG 2.2, 1.4.3), and no shape, mark or line is told by colour
alone. Rules name their colours outright: not every viewer knows custom properties.
"""

from __future__ import annotations

from collections.abc import Iterable

from pcinuma.picture import Fit
from pcinuma.picture_text import SIZE

STYLES = 8
"""Host nodes with a colour and a shape of their own; from there on they come again, with bars before the shape."""
_BARRED = 4 * STYLES
"""Host nodes told apart by filled shapes: with no bar, one, two, three. From there on the shapes are hollow."""
FORMS = 2 * _BARRED
"""Host nodes told apart by shapes; more are by their number alone, which is written at every device."""
DASH = 12
"""The length of a dash and its gap in the line of what is not aligned."""
_BAR = 3.0
"""The width of a bar and of the gap after it."""
_RIM = 2.0
"""How thick a hollow shape is."""

_LIGHT = ("#0b5cad", "#9a3f00", "#0f6b3a", "#7a2f9e", "#00666b", "#a81e63", "#5f5a00", "#465569")
_DARK = ("#79b8ff", "#ffab70", "#6fd69a", "#d3a6ff", "#5fd7de", "#ff9bcb", "#d9cf57", "#b6c4d4")

_SANS = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",Arial,sans-serif'
_MONO = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace'

_CROSS = "M-3.6,-3.6L3.6,3.6M3.6,-3.6L-3.6,3.6"
MARKS: dict[Fit, tuple[str, str]] = {
    "aligned": ("M-8,0A8,8 0 1 1 8,0A8,8 0 1 1 -8,0Z", "M-3.8,0.4L-1,3.2L4,-2.8"),
    "approximate": ("M0,-9L9,0L0,9L-9,0Z", "M-4,-1.2Q-2,-3.6 0,-1.6T4,-2M-4,2.6Q-2,0.2 0,2.2T4,1.8"),
    "astray": ("M-8,-8H8V8H-8Z", _CROSS),
    "unseen": ("M-8,-8H8V8H-8Z", _CROSS),
    "unknown": ("M-8,-8H8V8H-8Z", "M-2.8,-2.2Q-2.6,-5 0,-5Q2.8,-5 2.8,-2.4Q2.8,-0.6 0,0.4V1.8M0,4.2V5.4"),
}
"""The mark of each fit, about its middle: its ground and its sign, as paths, for no font is sure to have them."""


def tone_of(fit: Fit) -> str:
    return {"aligned": "good", "approximate": "near"}.get(fit, "alarm")


def bars_of(form: int) -> float:
    """The width that the bars take of a host node's shape; -1 for no node."""
    return _BAR * (max(form, 0) % _BARRED // STYLES)


def is_hollow(form: int) -> bool:
    """Whether what is written in the shape stands on the ground of what is around it."""
    return form >= _BARRED


def outline(form: int, width: float, height: float) -> str:
    """The path of a host node's shape, with the bars before it, about the origin; -1 for no node. Filled by the rule
    evenodd."""
    left, top, bars = -width / 2, written(-height / 2), bars_of(form)
    drawn = "".join(
        f"M{written(left + _BAR * bar)},{top}h1.6v{written(height)}h-1.6Z" for bar in range(round(bars / _BAR))
    )
    kind, width, middle = form % STYLES if form >= 0 else -1, width - bars, bars / 2
    drawn += _outline(kind, width, height, middle)
    return drawn + _outline(kind, width - 2 * _RIM, height - 2 * _RIM, middle) if is_hollow(form) else drawn


def _outline(form: int, width: float, height: float, middle: float) -> str:
    """The shape alone, about (middle, 0)."""
    x, y = width / 2, height / 2
    c = min(5.0, x)
    corners: dict[int, list[tuple[float, float]]] = {
        -1: [(-x, -y), (x, -y), (x, y), (-x, y)],
        1: [(-x, -y), (x, -y), (x, y), (-x, y)],
        2: [(-x + c, -y), (x - c, -y), (x, 0), (x - c, y), (-x + c, y), (-x, 0)],
        3: [(-x + c, -y), (x, -y), (x - c, y), (-x, y)],
        4: [(-x, -y), (x - c, -y), (x, 0), (x - c, y), (-x, y)],
        5: [(-x, -y), (x, -y), (x - c, 0), (x, y), (-x, y), (-x + c, 0)],
        6: [(-x + c, -y), (x - c, -y), (x, y), (-x, y)],
        7: [(-x + c, -y), (x, -y), (x, y - c), (x - c, y), (-x, y), (-x, -y + c)],
    }
    if form == 0:
        r, h, low = written(min(x, y)), written(y), written(-y)
        left, right = written(middle - x + min(x, y)), written(middle + x - min(x, y))
        return f"M{left},{low}H{right}A{r},{h} 0 0 1 {right},{h}H{left}A{r},{h} 0 0 1 {left},{low}Z"
    return "M" + "L".join(f"{written(middle + a)},{written(b)}" for a, b in corners[form]) + "Z"


def moved(x: float, y: float) -> str:
    return f"translate({written(x)} {written(y)})"


def written(value: float | str) -> str:
    """A coordinate to a tenth, without a needless point; other attributes as they are."""
    if isinstance(value, str):
        return value
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def css() -> str:
    own = ".pcinuma-picture "

    def rules(pairs: Iterable[tuple[str, str]]) -> str:
        return "\n".join(
            ",".join(f"{own}{selector}".replace(f"{own}&", ".pcinuma-picture") for selector in selectors.split(","))
            + "{"
            + body
            + "}"
            for selectors, body in pairs
        )

    def colours(
        text: str,
        dim: str,
        ground: str,
        chip: str,
        on: str,
        good: str,
        near: str,
        alarm: str,
        faint: str,
        nodes: Iterable[str],
    ) -> str:
        return rules(
            (
                ("text", f"fill:{text}"),
                (".dim", f"fill:{dim}"),
                (".ground", f"fill:{ground}"),
                (".chip,.port", f"fill:{chip}"),
                (".chip", f"stroke:{dim}"),
                (".port,.wire", f"stroke:{faint}"),
                (".badgetext", f"fill:{on}"),
                (".sign", f"stroke:{on}"),
                (".markground", "fill:currentColor"),
                (".good", f"color:{good}"),
                (".near", f"color:{near}"),
                (".alarm", f"color:{alarm}"),
                (".goodtext", f"fill:{good}"),
                (".neartext", f"fill:{near}"),
                (".alarmtext,text.alarm", f"fill:{alarm}"),
                (".nearchip", f"stroke:{near}"),
                (".alarmchip,.refusal", f"stroke:{alarm}"),
                (".nx", f"color:{dim}"),
                *((f".n{number}", f"color:{colour}") for number, colour in enumerate(nodes)),
            )
        )

    fixed = rules(
        (
            ("&", f"font:{SIZE}px {_MONO}"),
            ("text", f"font-family:{_MONO};white-space:pre"),
            (".h", f"font-family:{_SANS};font-weight:700"),
            (".b", "font-weight:700"),
            (".i", "font-style:italic"),
            (".box", "stroke:currentColor;fill:currentColor;fill-opacity:.05"),
            (".outer", "stroke-width:2"),
            (".inner", "stroke-width:1;stroke-opacity:.55"),
            (".box.nx", "stroke-dasharray:2 3"),
            (".chip,.port", "stroke-width:1"),
            (".nearchip,.alarmchip", "stroke-width:2;stroke-dasharray:5 3"),
            (".badge", "fill:currentColor;fill-rule:evenodd"),
            (".badge.nx", "fill:none;stroke:currentColor;stroke-width:1.5;stroke-dasharray:3 2"),
            (".sign", "fill:none;stroke-width:2;stroke-linecap:round;stroke-linejoin:round"),
            (".line", "fill:none;stroke:currentColor;stroke-width:2"),
            (".broken", f"stroke-dasharray:{DASH // 2} {DASH // 2};stroke-width:1.6"),
            (".line:hover", "stroke-width:4"),
            (".wire", "fill:none;stroke-width:1.5"),
            (".refusal", "fill:none;stroke-width:3"),
        )
    )
    light = colours(
        "#1b1f24", "#4d5761", "#ffffff", "#ffffff", "#ffffff", "#0b6b34", "#7a4b00", "#b3140f", "#7d8894", _LIGHT
    )
    dark = colours(
        "#e8edf2", "#aab6c2", "#12161c", "#1a2028", "#12161c", "#69d391", "#ffc45c", "#ff9088", "#7d8894", _DARK
    )
    return f"\n{fixed}\n{light}\n@media screen and (prefers-color-scheme:dark){{\n{dark}\n}}\n"
