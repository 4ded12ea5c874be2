"""What is lost in float16 and E5M2 by a plain training step, and by a scalified one?

    python -m benchmarks.accuracy.numerics_page  # writes docs/numerics.md and two heat maps

The GPT of the example is trained in float32, and with everything in float16 (`fp16-all`); then
`jsa.numerics.report` looks at the next step of each. Tensors of the two are paired by pass, module,
primitive, line of the model, shape, and order, where both have equally many of that kind; the page
compares what the pairs lose, and names what is not better.
"""

import argparse
import collections
import dataclasses
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
from PIL import Image

import jax_scalify as jsa
from benchmarks.paths import ROOT
from examples.gpt import data, step
from examples.gpt.config import get_size
from examples.gpt.presets import get_preset
from jax_scalify.numerics import Report, Row
from jax_scalify.numerics.heat_map import label

FORMATS = ("float16", "float8_e5m2")
PRESETS = {"fp32": "numerics-float32.png", "fp16-all": "numerics-scalified.png"}
PHASES = ("forward", "backward", "input")  # an update is computed in float32 by both
EXPONENTS = (-44, 15)
SUMMARY, SUMMARY_EXPONENTS = "numerics-summary.png", (-40, 17)
SHARE = 0.01  # what is lost below that is not spoken of
SEED = 0

INTRO = """\
# Looking at the numbers

This page shows how to find the tensor, the line or the matmul that makes a training step go wrong.
In the examples, `update` is the step below. A step with an optimizer works in the same way:

```python
import jax
import jax.numpy as jnp

import jax_scalify as jsa


def loss_fn(params, x):
    return jnp.square(jnp.tanh(x @ params["w"])).mean()


update = jax.jit(jsa.scalify(jax.value_and_grad(loss_fn)))
data = jax.random.normal(jax.random.key(0), (3, 1024, 256), jnp.float16)
plain = {{"w": jax.random.normal(jax.random.key(1), (256, 256)) / 16}}
args = jsa.as_scaled_array(plain, scale="rms", dtype=jnp.float16), data[0]
```

## Which tool

Tools without a module are functions of `jsa.numerics`; `seen` is a [report](#a-report-of-a-step).

| symptom | tool | remedy |
| --- | --- | --- |
| the loss is nan or infinite | `find_nonfinite(update)(*args)` | Do what its `remedy` says, and \
skip steps whose gradient [exploded](limits.md#exploding-gradients). |
| the loss is finite, but results differ from float32 | `suggest(seen)` | Give the tensor \
that it names another scale, or [scales per channel](limits.md#one-scale-for-a-whole-array). |
| the loss stops falling late in training | `track(update)`, `plot_scales` | Add updates with \
`jsa.optim.apply_updates`, and store moments with `jsa.optim.low_precision` \
([optimizers](optimizers.md)). |
| the loss gets worse with frozen scales | `calibration.guard(state)` | \
[Calibrate again](start.md#static-scales-for-long-runs) from the current state. |
| the loss in FP8 is higher than expected | `check_fp8(update, *args)` | Check that the embedding, \
the head and the router are in 16 bits, or [use FP8 in the backward pass only](\
fp8.md#if-the-loss-is-worse-in-fp8). |
| FP8 is no faster | `check_fp8(update, *args)` on the GPU, column `kernel` | Change the \
matmuls that fell back so that they meet the \
[conditions of an FP8 kernel](fp8.md#what-becomes-an-fp8-kernel). |
| the step saves no memory | `check_fp8(update, *args)`, operands `f32` | Cast the batch, position \
table or embedding that [is still float32](frameworks.md#is-it-float16). |
| elements at the largest number: data saturates | `print(seen)`, the third number of \
[`lost`](#a-report-of-a-step) | Call `jsa.dynamic_rescale` on the value, or \
[calibrate the step](limits.md#stored-float16-saturates-or-is-infinite). |
| gradients are zero | `seen.filter(phase="backward")` | Take the derivative \
[inside `scalify`](limits.md#derivatives), or rescale the cotangent that underflows with \
[`jsa.ops.dynamic_rescale_l2_grad`](optimizers.md#scales-by-hand). |
| the first step is slow to compile | `compile_report(update, *args).seconds`, before \
the first call | Make scales static, and put equal layers into a \
[`jax.lax.scan`](limits.md#when-not-to-use-it). |
| every step compiles again | `jsa.tree.check_same_structure(new_state, state)` | End the step \
with [`jsa.match_scales`](errors.md#new-differs-from-like-so-that-it-compiles-again). |
| a warning appears | the line in the message | Look the message up in \
[errors and warnings](errors.md), which says what causes it and what to do. |

- `report`, `find_nonfinite` and `track` run the step: they return a function that is called with
  its arguments. `check_fp8` and `compile_report` only compile it, and take the arguments directly.
  With `target="h100"` they compile for a GPU that need not be there.
- `find_nonfinite` returns the line that makes the first nan or infinity, its operands and a remedy,
  or None. Pass the last arguments that were finite.

## A report of a step

`jsa.numerics.report` runs a step once and measures every value that the step computes: its scale,
its range, a histogram of its exponents, and what a format would lose of it:

```python
seen = jsa.numerics.report(update, formats=["float8_e5m2"])(*args)
print(seen.filter(phase="backward"))
```

```text
name  pass      primitive    line            shape       dtype    scale  log2 rms  smallest  \
largest  lost      in float8_e5m2
-     backward  dot_general  numerics.md:14  [256,256]   float16  -13    -0.1      2.3e-06   \
3.9e+00  0/<.1/0%  <.1/<.1/0%
-     backward  mul          numerics.md:14  [1024,256]  float16  -18    0.3       2.4e-06   \
2.0e+00  0/<.1/0%  <.1/<.1/0%
-     backward  mul          numerics.md:14  [1024,256]  float16  -18    -0.9      2.4e-06   \
7.7e-01  0/<.1/0%  <.1/<.1/0%
lost: to zero / subnormal / at or beyond the largest finite value
3 values, 3 scaled, 0 with nan or inf. Values with more than 1% of the elements lost, subnormal or \
at the limit: 0 in their own dtype, 0 in float8_e5m2.
```

`scale` is the exponent of the scale; `log2 rms` and the columns after it are for the data.
`suggest` says what to do, the most important first. Here it looks at the gradient without scales:

```python
wide = jsa.numerics.report(jax.grad(loss_fn), formats=["float16"])(plain, data[0])
print(jsa.numerics.suggest(wide)[0])
```

```text
backward pass, mul at numerics.md:14: in float16 100% of the elements are subnormal (RMS 2^-19). \
It needs a scale of 2^-19: jsa.scalify gives it one, with its state from jsa.as_scaled_array. The \
same at forward pass, reduce_sum at numerics.md:14 (2^17).
```

```python
print(seen)  # every value: those with nan or inf, then those that lose most
print(seen.underflowing("float8_e5m2"))  # what E5M2 would make zero
seen.to_html("report.html")  # every value, to be sorted and searched
jsa.numerics.plot_histogram(seen, "report.png")
```

The step may be jitted or not, and scalified or not. `report` computes its equations one by one and
brings every value to the host, so it is slow. Use `track` during training.

## Many steps

`jsa.numerics.track` returns the step with one more result. In every N-th call it is a record of the
selected values, otherwise None:

```python
tracked = jsa.numerics.track(update, ["args[0]*", "backward/*dot_general*"], every=2)
history = []
for step, batch in enumerate(data):
    (loss, grads), record = tracked(args[0], batch)
    if record is not None:
        history.append(record.as_dict(step))  # numbers: log them, or write them as JSON
jsa.numerics.plot_scales(history, "scales.png")
```

The second argument selects values by name. `tracked.names(*args)` lists the names: `args[0]['w']`
for an argument, `backward/block_0/mlp:dot_general` for a value of the backward pass. A string
selects by exact name, else by substring or pattern (`*`, `?`). The two strings above select all
weights and the matmuls of the backward pass. You may also pass a function from a name to a bool. By
default, all floating-point arguments are selected.

`track` compiles a second program for the steps that have a record. The other steps run `update`.

## The training step of a GPT

The rest of this page is written by `make numerics`. It reports on the GPT of the example (size
`tiny`: 4 blocks of width 64) after {steps} training steps, on JAX {version}. It compares two steps:

- The *plain* step computes in float32.
- The *scalified* step is the same step through `scalify`, with weights, activations, gradients and
  moments in float16 and no loss scaling.

The page compares *partners*: tensors that both steps compute in the same place (pass, module, line,
primitive and shape), and equally often. The pictures show the tensors that have a partner, one per
row, the first computed at the top. In the dark grey, numbers are zero in float16; in the light
grey, they are subnormal and have fewer bits. The column 0 at the left counts exact zeros.

## The plain step, in float32

float16 would hold the values of the forward pass, but not those of the backward pass and of Adam's
second moments (`nu`):

![Exponents of the plain float32 step]({plain})

## The scalified step, in float16

The colours show the data, which float16 has to hold. A dot marks the exponent of a tensor's scale:

![Exponents of the scalified float16 step]({scalified})
"""

METHOD = """\
## What underflows in the two steps

Each row of the tables is for the tensors of one kind in all blocks (`*`). Tensors are named by
their module and the line of the model, so `block_*/Attention:43` is line 43, in the attention of
each block. A cell has the smallest and the largest share among these tensors:

- *Plain* is the share of the elements of the plain step's tensor that the format would make zero.
- *Scalified* is the share of the elements of its partner that are zero in the format, without the
  elements that are zero in the plain step. For float16, in which the scalified step really
  computes, this also counts zeros that come from earlier equations.
- A tensor is *fixed* if the scalified share is below {share:.0%}.

The tables include the optimizer's stored state. They leave out what the optimizer computes between
gradients and new weights, because both steps compute it in float32.
"""

WITHOUT_PARTNER = """\
{count} of the tensors that would underflow have no partner. Most are inside functions with their
own rule (LayerNorm, GELU, softmax, the loss), which the scalified step computes as a whole, with
float32 inside. {rest} values exist only in the scalified step; {bad} of them lose more than
{share:.0%}. The tensors without a partner, by line of the model:
"""

LOSSY = """\
The values of the scalified step that lose more than {share:.0%}
(`custom_scale`: a function with its own rule):
"""

NOT_FIXED = """\
`qkv/bias` (in the moments) is the bias of queries, keys and values. The `reduce_sum` of
`Attention:43` is its gradient. The bias of the keys adds the same number to all scores of a
query, so it does not change the softmax. Its gradient is zero in exact arithmetic, and rounding
noise otherwise. The keys' part has a third of the elements, the 33% of the tables, and only its
noise is lost. How much of it is lost differs between blocks, so a line may be in both tables.

The other tensors in the table of E5M2 lose the tails of wide distributions. In a step with FP8
matmuls, E5M2 only has to hold the cotangents of linear layers. The cotangent of queries, keys and
values (`Attention:43`, `concatenate`) is one of them. The cotangents inside attention are not.

Next: [Recipes](recipes.md) shows code to copy, from logging to export.
"""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A tensor of the plain step, and of the scalified one if it has it."""

    plain: Row
    scalified: Row | None

    @property
    def kind(self) -> tuple[str, str, str]:
        """Name, primitive and pass, the same for all blocks."""
        *place, last = label(self.plain)
        name = "/".join(place)
        if self.plain.phase == "input":
            name, last = f"{name}/{last}", ""
        name = re.sub(r"(blocks/|block_)\d+", r"\1*", name)
        return name, last, self.plain.phase

    def lost(self, dtype: str) -> float:
        """Return the share of the scalified tensor's elements that are lost."""
        row = self.scalified
        assert row is not None
        zeros = (row.measure.zeros - self.plain.measure.zeros) / row.size
        lost = max(zeros, 0) + row.shares(dtype)[0]
        return max(lost, row.shares()[0]) if row.dtype == dtype else lost


def look(preset_name: str, steps: int) -> Report:
    """Train, and report on the next step."""
    config, preset = get_size("tiny"), get_preset(preset_name)
    corpus = data.load_corpus(None, context=config.context)

    def batch(number: int):
        return data.train_batch(
            corpus, seed=SEED, step=number, batch=config.batch, context=config.context
        )

    state = step.init_state(config, preset, seed=SEED)
    update = step.make_update(config, preset)
    for number in range(1, steps + 1):
        state, _ = update(state, batch(number))
    return jsa.numerics.report(update, formats=FORMATS)(state, batch(steps + 1))


def pair(plain: Report, scalified: Report) -> tuple[list[Pair], list[Row]]:
    """Pair the tensors of two reports; return the pairs, and what of the second one is left."""
    pairs, known = [], _by_kind(scalified)
    for kind, rows in _by_kind(plain).items():
        # Where one has more, they are inside of a function that the other computes as a whole.
        partners = known.pop(kind) if len(known.get(kind, ())) == len(rows) else [None] * len(rows)
        pairs += map(Pair, rows, partners)
    order = {id(row): i for i, row in enumerate(plain)}
    pairs.sort(key=lambda p: order[id(p.plain)])
    return pairs, [row for rows in known.values() for row in rows]


def _by_kind(report: Report) -> dict[tuple, list[Row]]:
    kinds: dict[tuple, list[Row]] = {}
    for row in report:
        if row.size > 1 and row.phase in PHASES:
            line = row.line.rpartition("/")[2]
            # The casts of one step are not those of the other.
            cast = id(row) if row.primitive == "convert_element_type" else None
            key = (row.phase, row.name, line, row.primitive, row.shape, cast)
            kinds.setdefault(key, []).append(row)
    return kinds


def table(pairs: Iterable[Pair], dtype: str) -> str:
    """Return a table of pairs, those of one kind in a line, the worst first."""
    kinds: dict[tuple, list[Pair]] = {}
    for found in pairs:
        kinds.setdefault(found.kind, []).append(found)
    lines = []
    for (name, primitive, phase), members in kinds.items():
        before = [p.plain.shares(dtype)[0] for p in members]
        after = [p.lost(dtype) for p in members]
        phase = "state" if phase == "input" else phase
        cells = (f"`{name}`", primitive or "-", phase, str(len(members)))
        lines.append((-max(before), (*cells, _range(before), _range(after))))
    header = ("tensor", "primitive", "pass", "tensors", "plain", "scalified")
    rows = [header, ("---",) * 3 + ("---:",) * 3, *(cells for _, cells in sorted(lines))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def by_line(rows: Sequence[Row]) -> str:
    """Return a list of rows, a line for each line of the model."""
    lines: dict[str, collections.Counter] = {}
    for row in rows:
        line = re.sub(r".*/", "", row.line)
        place = f"`{line}`" if line else "functions of JAX and of `jsa.nn`"
        lines.setdefault(place, collections.Counter())[row.primitive] += 1
    texts = []
    for place, counts in sorted(lines.items(), key=lambda item: item[0].strip("`")):
        kinds = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        texts.append(f"- {place}: {kinds}\n")
    return "".join(texts)


def _range(shares: Sequence[float]) -> str:
    low, high = (_percent(f(shares)) for f in (min, max))
    return low if low == high else f"{low} - {high}"


def _percent(share: float) -> str:
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


def page(reports: dict[str, Report], steps: int) -> str:
    """Return the page as Markdown."""
    plain, scalified = reports["fp32"], reports["fp16-all"]
    pairs, rest = pair(plain, scalified)
    parts = [
        INTRO.format(
            steps=steps,
            version=jax.__version__,
            plain=PRESETS["fp32"],
            scalified=PRESETS["fp16-all"],
        ),
        METHOD.format(share=SHARE),
    ]
    for dtype in FORMATS:
        under = [p for p in pairs if p.plain.shares(dtype)[0] > SHARE]
        both = [p for p in under if p.scalified is not None]
        fixed = [p for p in both if p.lost(dtype) <= SHARE]
        bad = [p for p in both if p.lost(dtype) > SHARE]
        alone = [p.plain for p in under if p.scalified is None]
        lossy = [row for row in rest if max(row.shares(dtype)[0], row.shares()[0]) > SHARE]
        parts.append(
            f"### {dtype}\n\n{len(under)} of {len(pairs)} tensors of the plain step would lose "
            f"more than {SHARE:.0%} to zero.\n{len(both)} of them have a partner: {len(fixed)} are "
            f"fixed, {len(bad)} are not. The other {len(alone)} are below the tables.\n"
        )
        if bad:
            parts += ["**Not fixed:**\n", table(bad, dtype)]
        if fixed:
            parts += ["**Fixed:**\n", table(fixed, dtype)]
        if alone:
            counts = dict(count=len(alone), rest=len(rest), bad=len(lossy), share=SHARE)
            parts += [WITHOUT_PARTNER.format(**counts), by_line(alone)]
            parts += [LOSSY.format(share=SHARE), by_line(lossy)] if lossy else []
    parts += ["### What is still lost, and why\n", NOT_FIXED]
    return "\n".join(parts)


def draw(reports: dict[str, Report], directory: Path) -> None:
    """Draw the tensors that both reports have."""
    pairs, _ = pair(reports["fp32"], reports["fp16-all"])
    both = [p for p in pairs if p.scalified is not None]
    titles = {
        "fp32": "The plain training step in float32: would float16 hold its numbers?",
        "fp16-all": "The scalified training step in float16: the data, and the scales as dots",
    }
    for preset, name in PRESETS.items():
        rows = tuple(p.plain if preset == "fp32" else p.scalified for p in both)
        shown = Report(rows, FORMATS)
        jsa.numerics.plot_histogram(
            shown, directory / name, exponents=EXPONENTS, title=titles[preset]
        )
        picture = Image.open(directory / name).convert("RGB")
        picture = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        picture.save(directory / name, optimize=True)


def draw_summary(reports: dict[str, Report], path: Path) -> None:
    """Draw how the exponents of gradients and of second moments lie, without and with scales."""
    from matplotlib.figure import Figure

    pairs, _ = pair(reports["fp32"], reports["fp16-all"])
    kinds = {
        "gradients": lambda row: row.phase == "backward",
        "Adam's second moments": lambda row: row.phase == "input" and ".nu" in row.name,
    }
    exponents = range(*SUMMARY_EXPONENTS)
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    for ax, (kind, belongs) in zip(figure.subplots(1, 2, sharex=True), kinds.items(), strict=True):
        both = [p for p in pairs if p.scalified is not None and belongs(p.plain)]
        curves = {
            "plain step, in float32": ("#8c8c8c", [p.plain for p in both]),
            "scalified step: data in float16": ("#0072B2", [p.scalified for p in both]),
        }
        for title, (colour, rows) in curves.items():
            shares = _mean_shares(rows, exponents)
            ax.fill_between(exponents, shares, step="mid", color=colour, alpha=0.6, label=title)
        top = 1.12 * ax.get_ylim()[1]
        ax.set_ylim(0, top)
        for low, high, alpha, text in (
            (exponents[0], -24, 0.16, "zero in float16"),
            (-24, -14, 0.07, "fewer bits"),
        ):
            ax.axvspan(low, high, color="#d55e00", alpha=alpha, lw=0)
            ax.text((low + high) / 2, top * 0.98, text, ha="center", va="top", color="#a04000")
        ax.set_title(kind, fontsize=11)
        ax.set_xlim(exponents[0], exponents[-1])
        ticks = range(-40, 17, 8)
        ax.set_xticks(ticks, [f"$2^{{{e}}}$" for e in ticks])
        ax.set_yticks([])
        ax.spines[["top", "right", "left"]].set_visible(False)
    figure.axes[0].set_ylabel("share of the elements")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)


def _mean_shares(rows: Sequence[Row], exponents: range) -> list[float]:
    """Share of the elements that have an exponent, the mean of all tensors."""
    return [
        statistics.fmean(row.measure.histogram.get(e, 0) / row.size for row in rows)
        for e in exponents
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the reports, write the page and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=50, help="training steps (default: %(default)s)")
    add("--out", type=Path, default=ROOT / "docs", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be positive, got {options.steps}")
    reports = {}
    for preset in PRESETS:
        reports[preset] = look(preset, options.steps)
        print(f"{preset}: {reports[preset].summary}", flush=True)
    draw(reports, options.out)
    draw_summary(reports, options.out / SUMMARY)
    (options.out / "numerics.md").write_text(page(reports, options.steps))


if __name__ == "__main__":
    main()
