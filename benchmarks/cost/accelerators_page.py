"""Tables and picture of `benchmarks/cost/accelerators.py`; `docs/accelerators.md`."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

Results = Mapping[str, dict]
Rows = list[tuple[str, ...]]

HEADER = ("what", "bytes", "launches", "tiny", "temporary", "compile", "FP8 matmuls", "GB moved")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
LIMIT_HEADER = ("what", "16-bit TFLOP", "FP8 TFLOP", "arithmetic, ms", "memory, ms")
MODELS = ("llama", "gpt", "resnet", "moe")

INTRO = """\
# On GPUs and TPUs

These steps were compiled for each device with its own compiler, and not run. Launches, bytes and
memory are exact for these programs; on a GPU, autotuning may choose other kernels. No time was
measured: [how fast](fp8.md#how-fast) has times of an H200.

What to take from this page:

- Give weights static scales, as README does: on GPUs a training step then compiles 1.5 to 3.2 times
  as long as the plain step. With dynamic scales (`-dynamic`) it compiles 2.9 to 7.5 times as long,
  launches up to half more kernels and moves more bytes. With all scales static (`-frozen`) it
  compiles 1.3 to 2.5 times as long.
- On TPUs compute in bfloat16: compiled programs do not show with which precision the hardware
  multiplies float16. Make all scales static: on a v5p the recipe launches 1.3 to 2.1 times as many
  operations, with dynamic scales 2.1 to 3.1 times, with static ones 1.1 to 1.4 times.
- float16 halves what stays in memory between the steps, weights and moments.
- float16 moves as many bytes as bfloat16 on an H100, but for the ResNet (1.37): 0.93 in the Llama,
  0.99 in the MoE, 1.04 in the GPT. FP8 with all scales static reduces them in the Llama (0.83),
  the MoE (0.65) and the GPT (0.98), but not in the ResNet (1.27).
- One layer with FP8 matmuls and static scales launches half the kernels that Flax's FP8 has, and a
  fifth fewer than Qwix's. It moves 2% more bytes than Flax's, with dynamic scales 3% fewer. Its
  gradients leave at their scales, which costs a multiplication each; in a training step they do not
  leave.

The tables of v6e and TPU7x are of an earlier version.

There are two kinds of tables. *One layer* is a transformer layer of width 1,024 on 4 × 1,024
tokens, forward and backward. A *training step* uses AdamW and clipping. Sizes are per device:

- `llama`: a decoder of 4 scanned, rematerialised layers on 2 × 1,024 tokens;
- `moe`: the same with 2 of 8 experts per token, as grouped matmuls (`lax.ragged_dot`);
- `gpt`: Flax linen, 4 layers, not scanned, 2 × 1,024 tokens;
- `resnet`: Flax linen, ResNet-18 with batch norm, 32 images of 224 × 224.

Rows of a training step (`float16` and `fp8` were not compiled for v6e and TPU7x):

- `plain`: activations in bfloat16, weights and moments in float32. The ratios are to this row;
- `float16`: README's recipe, the weights at static scales;
- `fp8`: the same with `fp8_matmuls`;
- `float16-dynamic`, `fp8-dynamic`: the same with dynamic scales of the weights;
- `fp8-frozen`: FP8 with static scales only.

Rows of a layer: `plain` has no scales, `static` and `dynamic` are the layer through `scalify` with
scales of one kind. `flax`, `qwix` and `qwix-static` are the FP8 matmuls of other libraries. The row
`fp8_matmuls` is the row `fp8, plain` again: our FP8 matmuls without scales.

Columns:

- *bytes*: bytes of the operands and results of all launches, as a ratio. Caches do not count, nor
  do arrays that stay in a TPU's on-chip memory;
- *launches*: kernels, library calls, copies and collectives, each as often as it runs, as a ratio.
  A plain training step has 421 to 822 launches on GPUs, and 721 to 1,441 on TPUs;
- *tiny*: how many more launches move at most 4 KiB than in the row of ratio 1. They cost their
  launch, and hardly any memory traffic;
- *temporary*: temporary memory, as a ratio;
- *compile*: processor time of the compiler, as a ratio;
- *FP8 matmuls*: how many matmuls run in FP8. A TPU's program does not tell, so its count is 0;
- *GB moved*: the bytes, in GB.

In a table of collectives, a cell has for each dtype the megabytes per step and, in brackets, the
number of collectives.

On GPUs, matmuls are those of cuBLAS, without autotuning. As far as XLA's source says, it chooses a
block-scaled kernel by measuring on a device, so the block formats have no such kernel here ([block
scales](block_scales.md#what-it-runs-on)). `make accelerators` writes this page, and
`benchmarks/cost/accelerators.py` says more. `jsa.numerics.compile_report` counts the same for a
step of yours.

**What float16 is on each device.** A GPU's matmul reads and writes float16. XLA applies the power
of two behind it to the float32 sums if no other matmul of the program has the same factor and a
result of the same shape, and otherwise to the float16 result: such a result is infinite
[beyond 1,000 times the expected size](limits.md#outliers-of-float16-matmuls-on-a-gpu). The
compilers of v5p, v6e and TPU7x pass float16 operands to the matmul unit and get float32 sums; for
bfloat16 operands they write bfloat16. All three accept E4M3 operands. On TPUs we recommend
activations and weights in bfloat16 (`as_scaled_array(params, scale="rms", dtype="bfloat16",
static=True)`), the optimizer's state in float16 (`low_precision`), and `fp8_matmuls` where you
measure that it is faster.
"""

LIMITS = """
## What the hardware allows at best

This is an estimate; nothing was measured. The arithmetic of all matmuls runs at the dense rates
that the makers publish, and all bytes move at the bandwidth of the memory. No FP8 rate is published
for v5p and v6e, so their FP8 matmuls count at the rate of bfloat16. A step takes at least the
larger of the two times. Launches, collectives and everything else come on top.
"""


def rows_of(results: Results, base: str, keys: Mapping[str, str]) -> Rows:
    """Rows of ratios to the cell `base`, by title; cells that were not compiled are left out."""
    plain = results[base]
    rows = []
    for title, key in keys.items():
        cell = results.get(key)
        if cell is None:
            continue
        temporary = "-"
        if cell["memory"] and plain["memory"]["temporary"]:
            temporary = f"{cell['memory']['temporary'] / plain['memory']['temporary']:.2f}"
        rows.append(
            (
                title,
                f"{cell['bytes'] / plain['bytes']:.2f}",
                f"{cell['launches'] / plain['launches']:.2f}",
                f"{cell['tiny'] - plain['tiny']:+d}",
                temporary,
                f"{cell['seconds'] / plain['seconds']:.1f}",
                f"{cell['fp8']} of {cell['matmuls']}",
                f"{cell['bytes'] / 1e9:.2f}",
            )
        )
    return rows


def kernel_rows(results: Results, base: str, keys: Mapping[str, str]) -> tuple[tuple, Rows]:
    """What the matmuls of each format became, and what that costs beside the cell `base`."""
    plain = results[base]
    rows = [
        (
            title,
            ", ".join(cell["kernels"]),
            f"{cell['launches']}",
            f"{cell['bytes'] / plain['bytes']:.2f}",
            f"{cell['bytes'] / 1e9:.2f}",
        )
        for title, key in keys.items()
        if (cell := results.get(key)) is not None
    ]
    return ("format", "kernels", "launches", "bytes", "GB moved"), rows


def collective_rows(results: Results, keys: Mapping[str, str]) -> tuple[tuple, Rows]:
    """What the collectives of each step carry, by dtype."""
    rows = []
    for title, key in keys.items():
        if key not in results:
            continue
        cells = []
        for kind in COLLECTIVES:
            found = [c for c in results[key]["collectives"] if c["kind"] == kind]
            parts = [f"{c['bytes'] / 1e6:.3g} {c['dtype']} ({c['count']})" for c in found]
            cells.append(", ".join(parts) or "-")
        rows.append((title, *cells))
    return ("step", *COLLECTIVES), rows


def limit_rows(results: Results, rates: Mapping[str, tuple[float, float, float]]) -> Rows:
    """The least times of steps; `rates` are FLOP/s in 16 bits and in FP8, and bytes/s."""
    rows = []
    for key, cell in results.items():
        device, what, variant = key.split("/")[0], key.split("/")[1], key.rpartition("/")[2]
        if device not in rates or what in ("layer", "others", "linear"):
            continue
        wide, narrow, bandwidth = rates[device]
        flop, flop_fp8 = cell["flop"], cell["flop_fp8"]
        seconds = flop / wide + flop_fp8 / narrow
        rows.append(
            (
                f"{device}, {what}, {variant}",
                f"{flop / 1e12:.2f}",
                f"{flop_fp8 / 1e12:.2f}",
                f"{1e3 * seconds:.2f}",
                f"{1e3 * cell['bytes'] / bandwidth:.2f}",
            )
        )
    return rows


def markdown(tables: Iterator[tuple[str, tuple, Rows]], limits: Rows, picture: str) -> str:
    """The page: title, header and rows of each table, and the picture's name."""
    parts = [INTRO, f"\nJAX {jax.__version__}.\n"]
    if picture:
        parts.append(f"\n![Bytes, launches and memory of every cell]({picture})\n")
    for title, header, rows in tables:
        parts.append(f"\n## {title}\n\n{_table(header, rows)}")
    if limits:
        parts.append(f"{LIMITS}\n{_table(LIMIT_HEADER, limits)}")
    parts.append("\nNext: [FP8](fp8.md) shows how to run the matmuls in FP8.\n")
    return "".join(parts)


def _table(header: tuple, rows: Rows) -> str:
    rule = ("---", *["---:"] * (len(header) - 1))
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def draw(results: Results, path: Path) -> None:
    """Draw bytes, launches and temporary memory of the steps, as ratios to the plain ones."""
    from matplotlib.figure import Figure

    devices = list(dict.fromkeys(key.split("/")[0] for key in results))
    columns = (
        ("bytes moved", lambda cell: cell["bytes"]),
        ("launches", lambda cell: cell["launches"]),
        ("temporary memory", lambda cell: cell["memory"]["temporary"]),
    )
    figure = Figure(figsize=(8, 0.9 + 1.9 * len(devices)), layout="constrained")
    axes = figure.subplots(len(devices), len(columns), squeeze=False)
    colours = {"float16-dynamic": "#4477aa", "fp8-dynamic": "#cc6677", "fp8-frozen": "#228833"}
    labels = {
        "float16-dynamic": "float16-dynamic: float16, dynamic scales",
        "fp8-dynamic": "fp8-dynamic: the same with FP8 matmuls",
        "fp8-frozen": "fp8-frozen: static scales only",
    }
    for line, device in zip(axes, devices):
        models = [m for m in MODELS if f"{device}/{m}/plain" in results]
        for ax, (title, read) in zip(line, columns):
            for i, (variant, colour) in enumerate(colours.items()):
                cells = [
                    (results[f"{device}/{m}/plain"], results.get(f"{device}/{m}/{variant}"))
                    for m in models
                ]
                heights = [read(cell) / read(base) if cell else 0 for base, cell in cells]
                places = [k + 0.27 * (i - 1) for k in range(len(models))]
                bars = ax.bar(places, heights, width=0.25, color=colour, label=labels[variant])
                texts = ax.bar_label(bars, fmt="%.2f", fontsize=7.5, rotation=90, padding=2)
                for text in texts:  # legible where it meets the line at 1
                    text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
            ax.axhline(1, color="black", linewidth=0.8, zorder=0)
            ax.set_xticks(range(len(models)), models, fontsize=8)
            ax.tick_params(axis="y", labelsize=8)
            ax.set_xlim(-0.5, len(MODELS) - 0.5)
            ax.margins(y=0.3)
            ax.set_title(f"{device}: {title}", fontsize=9)
            ax.spines[["top", "right"]].set_visible(False)
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, fontsize=8, frameon=False, loc="outside lower center", ncols=3)
    title = "Training steps, as ratios to bfloat16 with float32 weights and AdamW"
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
