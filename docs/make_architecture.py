"""Draw the layers of the package: `python docs/make_architecture.py` writes docs/architecture.svg.

`LAYERS` is the one table of them. tests/test_architecture.py holds the imports against it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

PICTURE = Path(__file__).parent / "architecture.svg"


@dataclasses.dataclass(frozen=True)
class Layer:
    """Modules that import one another and what is below.

    Attributes:
        name: what the picture and the page call it.
        purpose: in a few words.
        modules: under `jax_scalify`. A package stands for all of its modules that have no entry.
    """

    name: str
    purpose: str
    modules: tuple[str, ...]


LAYERS = (  # the lowest first
    Layer(
        "Without scales",
        "JAX's versions, options, dtypes",
        ("_compat", "config", "base", "blocks.formats", "blocks.rounding"),
    ),
    Layer(
        "Scaled arrays",
        "data and scale as one leaf of a tree",
        ("arrays", "conversions", "blocks", "storage", "tree", "checkpoint"),
    ),
    Layer("Scales", "algebra, arrays, computed together", ("scales",)),
    Layer(
        "In a jaxpr",
        "the primitives of the package",
        ("primitives", "blocks.dot", "blocks.quantising"),
    ),
    Layer("While interpreting", "values, facts, the registry of rules", ("interpreter", "passes")),
    Layer("Rules", "one file a family of primitives", ("rules",)),
    Layer("The transform", "trace, then interpret", ("transform",)),
    Layer("In a model", "functions that set scales or have rules", ("ops", "lax", "testing")),
    Layer("Networks", "functions with rules for both passes", ("nn",)),
    Layer(
        "Around training",
        "FP8, optimizers, diagnostics, files",
        ("fp8", "checkpoint_policies", "optim", "numerics", "serving", "unit_scaling"),
    ),
    Layer(
        "Other libraries",
        "optional: imported by those who have them",
        (
            *("nn.linen", "nn.nnx", "nn._flax", "unit_scaling.linen", "unit_scaling.nnx"),
            *("unit_scaling._modules", "unit_scaling.optim", "integrations"),
        ),
    ),
    Layer("The package", "the public names; a report for bugs", ("__init__", "__main__")),
)

# What these modules need beyond the dependencies of the package.
OPTIONAL = {
    "nn.linen": {"flax"},
    "nn.nnx": {"flax"},
    "unit_scaling.linen": {"flax"},
    "unit_scaling.nnx": {"flax"},
    "unit_scaling.optim": {"optax", "flax"},  # Flax only if it is there
}


def layer_of(module: str) -> int | None:
    """The index of a module's layer, by the longest entry that it is in; None without one."""
    found = [
        (len(entry), index)
        for index, layer in enumerate(LAYERS)
        for entry in layer.modules
        if module == entry or module.startswith(f"{entry}.")
    ]
    return max(found)[1] if found else None


def extras_of(module: str) -> set[str]:
    """What a module may import at the top beyond the dependencies of the package."""
    found = [e for e in OPTIONAL if module == e or module.startswith(f"{e}.")]
    return set().union(*(OPTIONAL[e] for e in found))


def draw(path: Path = PICTURE) -> None:
    """Draw the layers as bands, the lowest at the bottom, with a box for each module."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "architecture"})
    matplotlib.rcParams["font.family"] = ["DejaVu Sans", "sans-serif"]
    width, left, unit, gap = 118, 39, 1.1, 1.2  # text of 9.2 points: 9 pixels on a page of 700
    rows = [_rows(layer.modules, width - left - 2, unit, gap) for layer in LAYERS]
    heights = [1.0 + 3.2 * len(lines) for lines in rows]
    total = sum(heights) + 0.5 * len(rows) + 4.5
    figure = Figure(figsize=(width / 12, total / 9), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, total))
    axes.axis("off")
    axes.text(width / 2, 2.2, "jax · ml_dtypes · numpy", ha="center", va="center", color="#666")
    bottom = 4.0
    for index, (layer, lines, height) in enumerate(zip(LAYERS, rows, heights, strict=True)):
        shade = "#eef3f8" if index % 2 else "#e2eaf2"
        axes.add_patch(_box(FancyBboxPatch, 1, bottom, width - 2, height, shade, "none"))
        middle = bottom + height / 2
        axes.text(2.5, middle + 1, layer.name, weight="bold", va="center", size=10.5)
        axes.text(2.5, middle - 1, layer.purpose, va="center", size=9.2, color="#444")
        for line, names in enumerate(lines):
            x, y = left, bottom + height - 3.1 - 3.2 * line
            for name in names:
                size = len(name) * unit + 2
                axes.add_patch(_box(FancyBboxPatch, x, y, size, 2.3, "white", "#5b7fa6"))
                style = {"family": "monospace", "size": 9.2, "ha": "center", "va": "center"}
                axes.text(x + size / 2, y + 1.1, name, **style)
                x += size + gap
        bottom += height + 0.5
    figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _rows(names: tuple[str, ...], width: float, unit: float, gap: float) -> list[list[str]]:
    """Break names into lines of boxes."""
    lines: list[list[str]] = [[]]
    used = 0.0
    for name in names:
        size = len(name) * unit + 2 + gap
        if lines[-1] and used + size > width:
            lines.append([])
            used = 0.0
        lines[-1].append(name)
        used += size
    return lines


def _box(kind, x, y, width, height, face, edge):
    style = "round,pad=0,rounding_size=0.5"
    return kind(
        (x, y), width, height, boxstyle=style, facecolor=face, edgecolor=edge, linewidth=0.8
    )


if __name__ == "__main__":
    draw()
