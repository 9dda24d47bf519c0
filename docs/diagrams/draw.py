"""Draws the diagrams beside it: `python docs/diagrams/draw.py`.

Boxes are filled and their text is white; lines and text outside boxes are of a grey that a light page and a dark one
both show.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
BLUE, GREEN, RED, GREY, VIOLET = "#2f5d9b", "#2c7a51", "#a8483f", "#5a6472", "#6f4fa0"
LINE = "#7d8896"
STYLE = (
    "text{font-family:ui-sans-serif,system-ui,sans-serif;font-size:13px;fill:#fff}"
    ".t{font-weight:600}.m{font-family:ui-monospace,monospace;font-size:12px}.o{fill:" + LINE + "}"
)


class Drawing:
    """Boxes, arrows and words, which add up to an SVG."""

    def __init__(self, title: str, width: int, height: int):
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []

    def box(self, x: int, y: int, w: int, h: int, fill: str, title: str, rows: Sequence[str] = ()) -> None:
        """A box with a title, and rows of code below it."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}"/>')
        start = y + (h - 17 * len(rows)) / 2 + 5 if rows else y + h / 2 + 5
        self.parts.append(_text(x + w / 2, start, title, "t"))
        for number, row in enumerate(rows, 1):
            self.parts.append(_text(x + w / 2, start + 17 * number, row, "m"))

    def arrow(self, *points: tuple[int, int], dashed: bool = False) -> None:
        """A line through points, with a head at its end."""
        drawn = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{drawn}" fill="none" stroke="{LINE}" stroke-width="1.6" marker-end="url(#h)"{dash}/>'
        )

    def words(self, x: float, y: float, text: str, *, anchor: str = "middle", code: bool = False) -> None:
        """Words outside boxes."""
        self.parts.append(_text(x, y, text, "o m" if code else "o", anchor))

    def write(self, name: str) -> None:
        """Write the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img"><title>{escape(self.title)}</title>'
            f"<style>{STYLE}</style><defs>"
            '<marker id="h" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0,0L8,4L0,8z" fill="{LINE}"/></marker></defs>'
        )
        (HERE / name).write_text("\n".join([head, *self.parts, "</svg>", ""]), encoding="utf-8")


def _text(x: float, y: float, text: str, kind: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def anatomy() -> None:
    """A declaration, the components that it becomes, the result."""
    d = Drawing("Anatomy of a quantizer: names become components, components a quantized tensor", 860, 330)
    d.words(115, 22, "an injector: names")
    d.box(
        10,
        35,
        210,
        250,
        GREY,
        "class W4(...)",
        [
            "bit_width = 4",
            "signed = True",
            "scaling_stats_op = MAX",
            "restrict_scaling = FP",
            "scaling_per_output = CHANNEL",
            "float_to_int_impl = ROUND",
            "zero_point_impl = Zero...",
            "... inherited",
        ],
    )
    d.words(245, 150, "wired", anchor="start")
    d.arrow((222, 162), (296, 162))
    d.words(470, 22, "tensor_quant: components")
    d.box(300, 35, 160, 54, BLUE, "bit_width_impl", ["b = 4"])
    d.box(300, 100, 160, 54, BLUE, "int_scaling_impl", ["t = 7 steps"])
    d.box(300, 165, 160, 54, BLUE, "scaling_impl", ["s = max |w| / t"])
    d.box(300, 230, 160, 54, BLUE, "zero_point_impl", ["z = 0"])
    d.box(
        510, 95, 150, 130, GREEN, "int_quant", ["q = clamp(", "round(w / s + z)", "- 7, 7)", "y = (q - z) s"]
    )
    for y in (62, 127, 192, 257):
        d.arrow((462, y), (485, y), (485, 160), (507, 160))
    d.words(765, 22, "the result: a QuantTensor")
    d.box(
        700,
        95,
        140,
        130,
        VIOLET,
        "IntQuantTensor",
        ["value   y", "scale   s", "zero_point z", "bit_width  b"],
    )
    d.arrow((662, 160), (697, 160))
    d.words(430, 315, "Override one name, and every component that depends on it is wired anew.")
    d.write("anatomy.svg")


def way() -> None:
    """One number through a quantized layer, forward and backward."""
    d = Drawing("A number's way through a QuantLinear", 860, 300)
    d.box(10, 40, 90, 50, GREY, "x", ["float"])
    d.box(10, 150, 90, 50, GREY, "kernel", ["float"])
    d.box(140, 40, 150, 50, BLUE, "input_quant", ["proxy"])
    d.box(140, 150, 150, 50, BLUE, "weight_quant", ["proxy"])
    d.box(330, 40, 150, 50, VIOLET, "QuantTensor", ["integers, scale s_x"])
    d.box(330, 150, 150, 50, VIOLET, "QuantTensor", ["integers, scale s_w"])
    d.box(520, 70, 150, 100, GREEN, "contraction", ["int8 x int8 -> int32", "* (s_x s_w)", "or dequantized"])
    d.box(710, 70, 130, 100, BLUE, "+ bias", ["bias_quant", "output_quant", "y: float or", "QuantTensor"])
    for y in (65, 175):
        d.arrow((102, y), (137, y))
        d.arrow((292, y), (327, y))
    d.arrow((482, 65), (500, 65), (500, 105), (517, 105))
    d.arrow((482, 175), (500, 175), (500, 135), (517, 135))
    d.arrow((672, 120), (707, 120))
    d.words(500, 22, "forward: the same integers in training, in evaluation and once frozen")
    d.arrow((775, 175), (775, 240), (55, 240), (55, 205), dashed=True)
    d.box(520, 218, 150, 44, RED, "grad_quant", ["gradient, if asked"])
    d.words(290, 258, "backward: straight through the rounding")
    d.write("way.svg")


ROOMS = (
    (RED, "catalogue | demo", "the ready-made quantizers found and drawn; the main job"),
    (RED, "odml | export | formats", "device compilers; StableHLO and ONNX; checkpoint files"),
    (VIOLET, "recipes", "passes over whole models after training"),
    (VIOLET, "model", "whole models: rules, calibration, loading, training steps, freezing, reports"),
    (VIOLET, "nn", "layers: the user's room"),
    (BLUE, "program", "a model's program, run with quantizers in it"),
    (BLUE, "quant", "ready-made quantizers: declarations only"),
    (BLUE, "proxy", "which tensor of which layer, and when its quantizer is assembled"),
    (GREEN, "dot", "quantized contractions: one engine"),
    (GREEN, "core", "components: statistics, scaling, rounding, bit width, zero point"),
    (GREEN, "quant_tensor", "the value that flows between layers"),
    (GREY, "ops | inject | native", "pure numerics (JAX only) | pure wiring (no JAX) | compiled kernels"),
)


def rooms() -> None:
    """The rooms, each above those that it may import."""
    d = Drawing("The rooms: each imports only the rooms below it", 860, 34 * len(ROOMS) + 20)
    for number, (fill, name, what) in enumerate(ROOMS):
        y = 10 + 34 * number
        d.box(40, y, 210, 28, fill, name)
        d.words(270, y + 19, what, anchor="start")
    d.arrow((20, 14), (20, 34 * len(ROOMS)))
    d.write("rooms.svg")


if __name__ == "__main__":
    anatomy()
    way()
    rooms()
