"""Draw the figure of a packed batch: `python -m docs.figures` writes `pictures/packed-batch.svg`."""

from pathlib import Path

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

PICTURES = Path(__file__).parent / "pictures"
DOCUMENTS = (("a", 7, 3), ("b", 3, 1), ("c", 5, 2), ("d", 4, 3))
"""The name of each document, its tokens, and how many of them are its prompt."""
COLORS = {"a": "#8ecae6", "b": "#ffb703", "c": "#b5c99a", "d": "#e5989b"}
PADDING = "#eeeeee"


def _cell(axes: Axes, x: float, y: float, color: str, *, text: str = "", learned: bool = False) -> None:
    axes.add_patch(Rectangle((x, y), 1, 0.9, facecolor=color, edgecolor="white", hatch="//" if learned else None, lw=1.5))
    if text:
        axes.text(x + 0.5, y + 0.45, text, ha="center", va="center", fontsize=8)


def draw(file: Path) -> None:
    """Draw padded rows, and below them the same documents packed.

    Args:
        file: The picture to write.
    """
    # The same names in every run, so that the file changes only if the figure does.
    rcParams["svg.hashsalt"] = "drivetrain"
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    longest, total = max(n for _, n, _ in DOCUMENTS), sum(n for _, n, _ in DOCUMENTS)
    for row, (name, length, prompt) in enumerate(DOCUMENTS):
        for i in range(longest):
            inside = i < length
            _cell(
                axes,
                i,
                6 - row,
                COLORS[name] if inside else PADDING,
                text=f"{name}{i}" if inside else "",
                learned=prompt <= i < length,
            )
    axes.text(
        longest + 0.4,
        5.4,
        f"padded: {len(DOCUMENTS)} x {longest} = {len(DOCUMENTS) * longest} positions,\n{len(DOCUMENTS) * longest - total} of them padding",
    )
    start, bounds = 0, [0]
    for name, length, prompt in DOCUMENTS:
        for i in range(length):
            _cell(axes, start + i, 1.2, COLORS[name], text=f"{name}{i}", learned=i >= prompt)
            axes.text(start + i + 0.5, 0.95, str(i), ha="center", va="top", fontsize=7, color="#555555")
        start += length
        bounds.append(start)
    for bound in bounds:
        axes.plot([bound, bound], [1.1, 2.25], color="black", lw=1)
        axes.text(bound, 2.3, str(bound), ha="center", va="bottom", fontsize=8)
    axes.text(-0.2, 2.35, "cu_seqlens", ha="right", va="bottom", fontsize=8)
    axes.text(-0.2, 1.65, "input_ids", ha="right", va="center", fontsize=8)
    axes.text(-0.2, 0.95, "position_ids", ha="right", va="top", fontsize=8)
    axes.text(0, 0.1, f"packed: {total} positions, no padding; attention stays within a document; hatched tokens are learned")
    axes.set(xlim=(-2.6, total + 0.5), ylim=(-0.2, 7.2))
    axes.axis("off")
    figure.savefig(file, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(PICTURES / "packed-batch.svg")
