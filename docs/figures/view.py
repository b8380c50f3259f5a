"""Draws view.svg: what one datum sees of z, and what must be remembered of it. Run from anywhere."""

from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

SEEN, UNSEEN, EDGE, RULE = "#3b7dd8", "#eef1f5", "#9aa4b2", "#333333"
CELLS, WINNER, LOSER = 18, 4, 12
NUM_DATA, DIM, BYTES = 169_405, 5_524, 4  # the tennis matches of the paper, in float32


def main() -> None:
    plt.rcParams.update({"font.size": 10, "svg.hashsalt": "view", "svg.fonttype": "path"})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.7), width_ratios=(1.25, 1), layout="constrained"
    )
    draw_datum(left)
    draw_tables(right)
    for axes in (left, right):
        axes.set_axis_off()
        axes.set_aspect("equal", anchor="N")
    path = Path(__file__).with_name("view.svg")
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def draw_datum(axes) -> None:
    """z, the two entries that a match reads, their difference, and its loss."""
    size, top = 0.36, 6.5
    for cell in range(CELLS):
        box(axes, 0, top - (cell + 1) * size, SEEN if cell in (WINNER, LOSER) else UNSEEN, size)
    axes.text(size / 2, top + 0.15, f"z: {DIM:,} abilities", ha="center", va="bottom")
    left, middle = 4.1, top - CELLS * size / 2
    for cell, label, sign, side in ((WINNER, "winner", "+1", 1), (LOSER, "loser", "−1", -1)):
        height = top - (cell + 0.5) * size
        axes.text(-0.15, height, label, ha="right", va="center")
        arrow(axes, (size + 0.08, height), (left - 0.1, middle + 0.12 * side))
        axes.text(2.1, (height + middle) / 2 + 0.35 * side, sign, ha="center", va="center")
    box(axes, left, middle - size / 2, SEEN, size)
    axes.text(left + size / 2, middle + 0.42, "η = A z", ha="center", va="bottom")
    axes.text(left, middle - 0.42, "K = 1 number", ha="left", va="top")
    arrow(axes, (left + size + 0.1, middle), (left + 2, middle))
    axes.text(left + 2.1, middle, "loss ℓ(η)", ha="left", va="center")
    axes.set_xlim(-1.2, 8)
    axes.set_ylim(-0.2, top + 0.7)
    axes.set_title("What one match sees", loc="left", fontweight="bold")


def draw_tables(axes) -> None:
    """A table with a row a datum: z for each, or η for each."""
    height, width = 5.2, 3.4
    axes.add_patch(Rectangle((0, 0), width, height, facecolor=UNSEEN, edgecolor=EDGE))
    axes.text(
        width / 2, height / 2, f"N × D\n{NUM_DATA * DIM * BYTES / 1e9:.1f} GB", ha="center", va="center"
    )
    axes.text(width / 2, -0.2, "a z for every match", ha="center", va="top")
    box(axes, width + 1.6, 0, SEEN, 0.07, height)
    small = f"N × K\n{NUM_DATA * BYTES / 1e6:.1f} MB"
    axes.text(width + 1.8, height / 2, small, ha="left", va="center", color=SEEN)
    axes.text(width + 1.7, -0.2, "an η for every match", ha="center", va="top", color=SEEN)
    axes.text(-0.25, height / 2, f"N = {NUM_DATA:,} matches", rotation=90, ha="right", va="center")
    axes.set_xlim(-0.9, 7.2)
    axes.set_ylim(-0.8, height + 0.3)
    axes.set_title("What must be remembered", loc="left", fontweight="bold")


def box(axes, left: float, bottom: float, color: str, width: float, height: float | None = None) -> None:
    height = width if height is None else height
    axes.add_patch(Rectangle((left, bottom), width, height, facecolor=color, edgecolor=EDGE))


def arrow(axes, start, stop) -> None:
    shape = FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=11, color=RULE, linewidth=1.1)
    axes.add_patch(shape)


if __name__ == "__main__":
    main()
