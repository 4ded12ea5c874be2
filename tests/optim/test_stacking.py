"""Updates of small leaves in stacks: the same numbers as leaf by leaf, in fewer equations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_scalify as jsa
from jax_scalify.base.jaxprs import all_equations
from jax_scalify.optim import stacking
from jax_scalify.optim.stacked_update import array_of, updated
from jax_scalify.optim.state_leaves import owners_of

SHAPES = {"kernel": (4, 6), "bias": (6,), "square": (6, 6)}


def _tree(seed, layers=3):
    rng = np.random.default_rng(seed)
    leaves = {f"{name}{i}": shape for i in range(layers) for name, shape in SHAPES.items()}
    leaves["embedding"], leaves["gain"] = (7, 6), ()
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in leaves.items()}


def _matrices(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def _first_layer(tree):
    return {name: name.endswith("0") for name in tree}


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "mask by rank": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=_matrices),
    "mask by name": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=_first_layer),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "clipped leaf by leaf": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "lars behind clipping": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.lars(1e-2)),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(1e-2),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2)),
    "finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "multi steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    "two rates": lambda: optax.multi_transform(
        {True: optax.adam(1e-2), False: optax.sgd(1e-3, momentum=0.9)}, _first_layer
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_the_optimizer(name):
    optimizer, params = OPTIMIZERS[name](), _tree(0)
    state = plain = optimizer.init(params)
    for step in range(3):
        grads = _tree(step + 1)
        wanted, plain = optimizer.update(grads, plain, params)
        owners = owners_of(state, params)
        _, got, state, _ = updated(optimizer.update, grads, state, params, owners, plain=True)
        got, state = jax.tree.map(array_of, (got, state))
        assert jax.tree.structure((got, state)) == jax.tree.structure((wanted, plain))
        for a, b in zip(
            jax.tree.leaves((got, state)), jax.tree.leaves((wanted, plain)), strict=True
        ):
            assert a.dtype == b.dtype
            if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def _count(function, *args):
    return sum(1 for _ in all_equations(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.parametrize("name", ["adamw", "mask by rank", "lion", "clipped"])
def test_equations_do_not_grow_with_the_layers(name):
    optimizer, counts = OPTIMIZERS[name](), []
    for layers in (4, 12):
        params = _tree(0, layers)
        state = optimizer.init(params)
        owners = owners_of(state, params)

        def update(grads, state, params, owners=owners):
            found = updated(optimizer.update, grads, state, params, owners, plain=True)[1:3]
            stacks = {x.stack for x in jax.tree.leaves(found) if isinstance(x, stacking.Item)}
            return [s.array for s in stacks if s is not None and s.array is not None]

        counts.append(_count(update, params, state, params))
    # What is left for each leaf: it goes into three or four stacks.
    assert counts[1] - counts[0] < 8 * 3 * 6


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_stacks_of_all_kinds_of_leaves(dtype):
    """Plain leaves, static scales, scales of rows, and zeros beside those with one scale."""
    params = {name: x.astype(jnp.float16) for name, x in _tree(0).items()}
    optimizer = jsa.optim.low_precision(optax.adam(1e-2), dtype=jnp.dtype(dtype))
    state = optimizer.init(params)
    mixed = jsa.as_scaled_array(params, scale="rms", dtype="float16")
    mixed["kernel1"] = params["kernel1"]
    mixed["square1"] = jsa.freeze_scales(mixed["square1"])
    mixed["square2"] = jsa.as_scaled_array(params["square2"], scale="rms", dtype="float16", axis=0)
    mixed["bias2"] = jsa.as_scaled_array(jnp.zeros_like(params["bias2"]))

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return jsa.optim.apply_updates(params, updates), state

    grads = _tree(1)
    new, new_state = jax.jit(jsa.scalify(step))(mixed, state, grads)
    wanted = jax.tree.map(
        lambda p, u: p + u,
        jsa.asarray(mixed, jnp.float32),
        optax.adam(1e-2).update(grads, optax.adam(1e-2).init(_tree(0)))[0],
    )
    for name, x in new.items():
        np.testing.assert_allclose(
            jsa.asarray(x, jnp.float32), wanted[name], rtol=2e-3, atol=2e-3, err_msg=name
        )
    assert float(new["square1"].scale) == mixed["square1"].scale  # a static one stays
    assert jnp.shape(new["square2"].scale) == jnp.shape(mixed["square2"].scale)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


def test_two_leaves_may_be_one_value():
    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros

    def update(grads, state, params=None):
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state[0], grads)
        return moments, (moments, moments)

    optimizer = jsa.optim.low_precision(optax.GradientTransformation(init, update))
    params, grads = _tree(0), _tree(1)
    _, (first, second) = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    for tree in (first, second):
        for x, g in zip(jax.tree.leaves(jsa.asarray(tree, jnp.float32)), jax.tree.leaves(grads)):
            np.testing.assert_allclose(x, g, rtol=2e-3)


def test_an_update_that_prints_does_so(capfd):
    adam = optax.adam(1e-2)

    def update(grads, state, params=None):
        jax.debug.print("bias {}", grads["bias0"][0])
        return adam.update(grads, state, params)

    optimizer = jsa.optim.low_precision(optax.GradientTransformation(adam.init, update))
    params = _tree(0)
    jax.block_until_ready(jax.jit(optimizer.update)(params, optimizer.init(params), params))
    jax.effects_barrier()
    assert "bias" in capfd.readouterr().out


def test_wide_parameters_keep_their_digits():
    with jax.enable_x64(True):
        params = {"a": jnp.asarray([1 + 2.0**-40]), "b": jnp.asarray([3 + 2.0**-40])}
        updates = {"a": jnp.zeros(1, jnp.float32), "b": jnp.zeros(1, jnp.float32)}
        new = jsa.optim.apply_updates(params, updates)
        assert all(new[name] == params[name] for name in params)


LARGE = {"a": (300, 400), "b": (300, 400), "c": (300, 300), "d": (4, 200, 200), "e": (70_000,)}


def test_sums_of_large_leaves_share_their_last_step():
    """Sums of rows are one array: a GPU adds them up in one kernel."""
    shapes = LARGE | {"f": (16, 16), "g": (16, 16)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: 1e-2 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    state = optimizer.init(params)
    owners = owners_of(state, params)

    def update(grads):
        found = updated(optimizer.update, grads, state, params, owners, plain=True)[1]
        return jax.tree.map(array_of, found)

    got, wanted = jax.jit(update)(params), optimizer.update(params, state, params)[0]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    equations = all_equations(jax.make_jaxpr(update)(params).jaxpr)
    sums = [e.invars[0].aval.shape for e in equations if e.primitive is jax.lax.reduce_sum_p]
    assert sums.count((3, 300)) == 1 and shapes["a"] in sums
    assert sums.count((4, 200, 200)) == 1 and (70_000,) in sums


@pytest.mark.parametrize("scales", ["static", "dynamic"])
def test_large_leaves_share_no_number_on_gpus(scales):
    """XLA would merge their kernels, and no two merged kernels are equal: see `pins.Copies`."""
    shape = (512, 512)
    params = {name: jnp.ones(shape, jnp.float16) for name in "abc"}
    params |= {name: jnp.ones(64, jnp.float16) for name in "xy"}
    params = jsa.as_scaled_array(params, scale="rms", static=scales == "static")
    opt = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1, 9))
    )
    opt = jsa.optim.low_precision(opt)

    @jsa.scalify
    def step(params, state, grads):
        updates, state = opt.update(grads, state, params)
        return jsa.optim.apply_updates(params, updates), state

    traced = jax.jit(step).trace(params, opt.init(params), params)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    body = lowered[lowered.index("func.func public @main") :].split("func.func private")[0]
    broadcast = r"broadcast_in_dim (%[\w#]+), dims = \[\] : \(tensor<\w+>\) -> tensor<512x512x"
    read = [name for name in re.findall(broadcast, body) if not name.startswith(("%cst", "%c_"))]
    assert len(read) > 12 and len(set(read)) == len(read)
