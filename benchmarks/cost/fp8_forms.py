"""What becomes of FP8 experts, of an FP8 base under adapters and of block formats, by compilers.

    python -m benchmarks.cost.fp8_forms                # an H100 and a B200
    python -m benchmarks.cost.fp8_forms --targets v5p

Needs the plugins of the targets, as `make accelerators` does, and no device. `docs/fp8.md` and
`docs/block_scales.md` quote the lines.
"""

import argparse
import functools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jax_scalify as jsa

ROWS, WIDTH, HIDDEN, EXPERTS = 4096, 1024, 2048, 8
LAYERS, RANK, EXAMPLES, CLASSES = 16, 16, 64, 8
E4M3 = jnp.float8_e4m3fn


def experts(multiply: Callable) -> tuple[Callable, tuple]:
    """Grouped matmuls in bfloat16, forward and backward: a function and its operands."""

    def passes(x, w, cotangent, sizes):
        out, pull = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
        return out, *pull(cotangent)

    shapes = (ROWS, WIDTH), (EXPERTS, WIDTH, HIDDEN), (ROWS, HIDDEN)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(passes), (*arrays, jax.ShapeDtypeStruct((EXPERTS,), jnp.int32))


def adapters(kind: str) -> tuple[Callable, tuple]:
    """A step of adapters on a frozen base, which is in bfloat16 or FP8, and its operands."""
    plain = kind == "bfloat16"
    optimizer = optax.adam(1e-3) if plain else jsa.optim.low_precision(optax.adam(1e-3))

    def loss(adapters, base, x, labels):
        def layer(h, weights):
            w, a, b = weights
            return jnp.tanh(h @ w + (h @ a) @ b), None

        h = lax.scan(layer, x, (base["layers"], adapters["a"], adapters["b"]))[0]
        return optax.softmax_cross_entropy_with_integer_labels(h @ base["head"], labels).mean()

    loss = jsa.fp8_matmuls(loss, jsa.fp8.linear_layers) if kind == "fp8-matmuls" else loss

    def step(adapters, state, base, x, labels):
        value, gradients = jax.value_and_grad(loss)(adapters, base, x, labels)
        updates, state = optimizer.update(gradients, state, adapters)
        return jsa.optim.apply_updates(adapters, updates), state, value

    dtype, stored = (jnp.bfloat16,) * 2 if plain else (jnp.float16, E4M3)
    small = {"a": jnp.zeros((LAYERS, WIDTH, RANK)), "b": jnp.zeros((LAYERS, RANK, WIDTH))}
    small = jax.tree.map(lambda v: v.astype(dtype), small)
    shapes = {"layers": (LAYERS, WIDTH, WIDTH), "head": (WIDTH, CLASSES)}
    base = {name: jax.ShapeDtypeStruct(shape, stored) for name, shape in shapes.items()}
    state = optimizer.init(small)
    if not plain:
        one = jax.ShapeDtypeStruct((), jnp.float32)
        base = {name: jsa.ScaledArray(data, one) for name, data in base.items()}
        small = jsa.as_scaled_array(small, scale=1.0)
        state = jsa.as_scaled_array(optimizer.init(small))
    examples = jnp.zeros((EXAMPLES, WIDTH), dtype), jnp.zeros(EXAMPLES, int)
    step = step if plain else jsa.scalify(step)
    return jax.jit(step, donate_argnums=(0, 1)), (small, state, base, *examples)


def linear(**formats) -> tuple[Callable, tuple]:
    """The three matmuls of a linear layer in bfloat16: a function and its operands."""
    multiply = functools.partial(jsa.nn.matmul, **formats) if formats else jnp.matmul

    def passes(x, w, cotangent):
        out, pull = jax.vjp(multiply, x, w)
        return out, *pull(cotangent)

    shapes = (ROWS, WIDTH), (WIDTH, 2 * HIDDEN), (ROWS, 2 * HIDDEN)
    return jax.jit(passes), tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)


def both(name: str) -> dict:
    """A block format in both passes."""
    return {"forward_dtype": name, "backward_dtype": name}


LINEAR = {
    "bfloat16": linear,
    "FP8": lambda: linear(forward_dtype=E4M3),
    "MXFP8": lambda: linear(**both("mxfp8")),
    "MXFP4": lambda: linear(**both("mxfp4")),
    "NVFP4": lambda: linear(**both("nvfp4")),
}
CASES = {
    "experts, bfloat16": lambda: experts(lax.ragged_dot),
    "experts, FP8": lambda: experts(jsa.nn.ragged_dot),
    "adapters, base in bfloat16": lambda: adapters("bfloat16"),
    "adapters, base in FP8": lambda: adapters("fp8-base"),
    "adapters, base in FP8, FP8 matmuls": lambda: adapters("fp8-matmuls"),
    **{f"linear, {kind}": make for kind, make in LINEAR.items()},
}


def dtypes_of_base(text: str) -> list[str]:
    """The dtypes in which a program has an array of as many elements as the base."""
    count = LAYERS * WIDTH * WIDTH
    found = re.findall(r"\b(\w+)\[([\d,]+)\]", text)
    sizes = {(dtype, math.prod(map(int, shape.split(",")))) for dtype, shape in found}
    return sorted({dtype for dtype, size in sizes if size == count})


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile every case for every target, and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["h100", "b200"])
    parser.add_argument("--only", default="", help="cases whose names begin so")
    options = parser.parse_args(arguments)
    for target in options.targets:
        for name, make in CASES.items():
            if not name.startswith(options.only):
                continue
            step, args = make()
            report = jsa.numerics.compile_report(step, *args, target=target)
            print(f"{name}: {report.summary}")
            if name.startswith("adapters"):
                print(f"  arrays as large as the base: {', '.join(dtypes_of_base(report.text))}")
            print(f"  {report.matmuls.summary}")


if __name__ == "__main__":
    main()
