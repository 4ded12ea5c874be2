"""The pictures of docs/how_it_works.md, drawn by `jsa.numerics`.

python docs/make_pictures.py     # some seconds; writes beside this file
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jax_scalify as jsa

HERE = Path(__file__).parent


def normal(seed, *shape):
    """Gaussian numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


def data_and_scale(file):
    """Four kinds of tensors as they are in float32, and as `ScaledArray`s of float16."""
    sizes = {"weights": -5, "activations": 2, "gradients": -18, "second moments": -36}
    tensors = {name: normal(0, 64, 64) * 2.0**size for name, size in sizes.items()}
    tensors["second moments"] = jnp.square(normal(1, 64, 64)) * 2.0 ** sizes["second moments"]
    scaled = jsa.as_scaled_array(tensors, scale="rms", dtype=jnp.float16)
    pairs = {}
    for name in tensors:
        pairs[f"{name}, float32"] = tensors[name]
        pairs[f"{name}, scaled"] = scaled[name]
    seen = jsa.numerics.report(lambda pairs: 0)(pairs)
    jsa.numerics.plot_histogram(seen, file, phases=["input"])


def operations(x, w, small):
    """What is computed in the second picture, each in a scope of its own."""
    with jax.named_scope("x * small"):
        product = x * small
    with jax.named_scope("x @ w"):
        matmul = x @ w
    with jax.named_scope("x + small"):
        total = x + small
    with jax.named_scope("0.001 * x"):
        constant = 0.001 * x
    with jax.named_scope("(x * x).sum(1)"):
        nonneg = (x * x).sum(1)
    return product, matmul, total, constant, nonneg


def one_operation_each(file):
    """A product, a matmul, a sum, a constant and a sum of squares, in float16."""
    arrays = {"x": normal(0, 64, 1024), "w": normal(1, 1024, 64)}
    arrays = {name: a.astype(jnp.float16) for name, a in arrays.items()}
    operands = jsa.as_scaled_array(arrays, scale=1.0)
    small = normal(2, 64, 1024).astype(jnp.float16)
    operands["small"] = jsa.scaled_array(small, jnp.float32(2.0**-12))
    step = jax.jit(jsa.scalify(lambda operands: operations(**operands)))
    seen = jsa.numerics.report(step)(operands)
    seen = seen.filter(where=lambda row: row.primitive != "convert_element_type")
    jsa.numerics.plot_histogram(seen, file, phases=["input", "forward"])


def loss_fn(layers, x, y):
    """The loss of a residual network."""
    h = x
    for name, w in layers.items():
        with jax.named_scope(name):
            h = h + jnp.tanh(h @ w)
    with jax.named_scope("loss"):
        return jnp.square(h.astype(jnp.float32).mean(1) - y).mean()


def both_passes(plain, scaled):
    """Forward and backward pass of eight layers: plain in float32, and scalified in float16."""
    layers = {f"layer_{i}": normal(i, 64, 64) / 8 for i in range(8)}
    arguments = layers, normal(10, 512, 64), normal(11, 512)
    step = jax.value_and_grad(loss_fn)
    seen = jsa.numerics.report(step, formats=["float16"])(*arguments)
    jsa.numerics.plot_histogram(seen, plain, phases=["forward", "backward"], exponents=(-40, 16))
    arguments = jsa.as_scaled_array(arguments, scale="rms", dtype=jnp.float16)
    seen = jsa.numerics.report(jax.jit(jsa.scalify(step)))(*arguments)
    jsa.numerics.plot_histogram(seen, scaled, phases=["forward", "backward"], exponents=(-40, 16))


def over_training(file):
    """The scales of the state over 200 steps, frozen after 100."""
    optimizer = jsa.optim.low_precision(optax.adam(3e-3))
    x = normal(10, 512, 64)
    y = jnp.sin(x[:, 0])

    @jax.jit
    @jsa.scalify
    def update(params, opt_state):
        grads = jax.grad(loss_fn)(params, x.astype(jnp.float16), y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return jsa.optim.apply_updates(params, updates), opt_state

    layers = {f"layer_{i}": normal(i, 64, 64) / 8 for i in range(2)}
    params = jsa.as_scaled_array(layers, scale="rms", dtype=jnp.float16)
    state = params, jsa.as_scaled_array(optimizer.init(params))
    tracked = jsa.numerics.track(update, every=5)
    records = []
    for step in range(1, 201):
        if step == 101:
            state = jsa.freeze_scales(state)
        state, record = tracked(*state)
        if record is not None:
            records.append(record.as_dict(step))
    jsa.numerics.plot_scales(records, file)


if __name__ == "__main__":
    data_and_scale(HERE / "how-data-and-scale.png")
    one_operation_each(HERE / "how-operations.png")
    both_passes(HERE / "how-plain.png", HERE / "how-scaled.png")
    over_training(HERE / "how-training.png")
