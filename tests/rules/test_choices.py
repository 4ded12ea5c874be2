"""One choice for a whole array: what is chosen is exact, whatever lies beside it.

A condition of rank 0, a dynamic index, `max` and `min` of two numbers: each chooses one of several
values, whose scales may be 2**40 apart. The guards of a division or a root (`where(n == 0, 1, n)`)
are such choices, as are clipping by a norm and a step that is skipped.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from tests.helpers import in_float64, is_scaled, value, values
from tests.programs import all_outcomes, scaled

pytestmark = pytest.mark.sampled(8)
DTYPES = ["float16", "bfloat16", "float32"]
KINDS = ["dynamic", "frozen"]
SIZES = [1e-12, 1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9, 1e12]

every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def _power(size):
    return float(2.0 ** np.floor(np.log2(size)))


def _normal(shape, size, dtype, kind, seed=0):
    """Normal numbers of a size, at a scale near to it."""
    numbers = np.random.default_rng(seed).normal(size=shape) * size
    return scaled(numbers, _power(size), dtype, kind)


def _same(got, want):
    """Compare trees element by element: a choice does not round."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(values(want)), strict=True):
        np.testing.assert_array_equal(g, w)


def _expected(function, *operands):
    """What the plain function computes in float64."""
    return in_float64(function, *values(operands))


def _near(got, want, dtype, epsilons=8, note=""):
    """Compare trees with float64, in epsilons of the largest number of each leaf."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        unit = float(jnp.finfo(dtype).eps) * (np.max(np.abs(w), initial=0) or 1)
        assert np.isfinite(g).all(), f"{note}: got {g}, float64 gives {w}"
        np.testing.assert_allclose(g / unit, w / unit, rtol=0, atol=epsilons, err_msg=note)


# Conditions of rank 0. ------------------------------------------------------------------------

CHOOSERS = {
    "where": jnp.where,
    "select": lax.select,
    "select_n": lambda c, a, b: lax.select_n(c, b, a),
    "cond": lambda c, a, b: lax.cond(c, lambda: a, lambda: b),
    "piecewise": lambda c, a, b: lax.switch(c.astype(jnp.int32), [lambda: b, lambda: a]),
    "condition of one element": lambda c, a, b: jnp.where(c[None, None], a, b),
    "computed condition of one element": lambda c, a, b: jnp.where(
        jnp.sum(a, keepdims=True) * 0 + c > 0.5, a, b
    ),
    "condition that is computed": lambda c, a, b: jnp.where(jnp.sum(a) * 0 + c > 0.5, a, b),
}


@every_kind
@every_dtype
@pytest.mark.parametrize("name", CHOOSERS)
def test_a_condition_of_rank_0_chooses_exactly(name, dtype, kind):
    small = _normal((3, 4), 1e-9, dtype, kind)
    rows = [
        (jnp.asarray(c), a, b)
        for c in (True, False)
        for one in (small, _normal((3, 4), 1e9, dtype, kind))
        for a, b in [(one, _normal((3, 4), 1.0, dtype, kind, 1))]
    ]
    rows += [(c, b, a) for c, a, b in rows]
    for results in all_outcomes(CHOOSERS[name], rows):
        _same(results, [a if c else b for c, a, b in rows])


@every_kind
@every_dtype
def test_a_choice_of_numbers_is_exact(dtype, kind):
    rows = [
        (
            jnp.asarray(c),
            scaled(1.5 * size, _power(size), dtype, kind),
            scaled(1.25, 1, dtype, kind),
        )
        for c in (True, False)
        for size in (1e-12, 1e-9, 1e9, 1e12)
    ]
    for results in all_outcomes(jnp.where, rows):
        _same(results, [a if c else b for c, a, b in rows])


BESIDE = {
    "zero": lambda x: 0.0,
    "zeros": jnp.zeros_like,
    "one": lambda x: 1.0,
    "ones": jnp.ones_like,
    "a large number": lambda x: 3e4,
    "inf": lambda x: jnp.inf,
    "nan": lambda x: jnp.nan,
    "a plain array": lambda x: jnp.arange(12.0).reshape(3, 4).astype(x.dtype),
}


@every_kind
@every_dtype
@pytest.mark.parametrize("name", BESIDE)
def test_constants_beside_an_array_are_as_exact(name, dtype, kind):
    rows = [
        (jnp.asarray(c), _normal((3, 4), size, dtype, kind))
        for c in (True, False)
        for size in (1e-12, 1e-9, 1.0, 1e9, 1e12)
    ]
    want = [
        x if c else np.broadcast_to(jnp.asarray(BESIDE[name](x.data), dtype), x.shape)
        for c, x in rows
    ]
    for results in all_outcomes(lambda c, x: jnp.where(c, x, BESIDE[name](x)), rows):
        _same(results, want)
    for results in all_outcomes(lambda c, x: jnp.where(~c, BESIDE[name](x), x), rows):
        _same(results, want)


@every_dtype
def test_what_is_chosen_has_its_scale(dtype):
    for size in (1e-9, 1e9):
        a, b = _normal((3, 4), size, dtype, "dynamic"), _normal((3, 4), 1.0, dtype, "dynamic")
        for c, chosen in ((True, a), (False, b)):
            result = jax.jit(jsa.scalify(jnp.where))(jnp.asarray(c), a, b)
            assert float(result.scale) == float(chosen.scale)


@every_kind
@every_dtype
def test_gradients_reach_what_is_chosen_and_nothing_else(dtype, kind):
    def gradients(c, a, b):
        return jax.grad(lambda a, b: jnp.sum(jnp.square(jnp.where(c, a, b))), (0, 1))(a, b)

    rows = [
        (jnp.asarray(c), _normal(4, size, dtype, kind), _normal(4, 1.0, dtype, kind, 1))
        for c in (True, False)
        for size in (1e-9, 1e9)
    ]
    for results in all_outcomes(gradients, rows):
        for (of_a, of_b), (c, a, b) in zip(results, rows, strict=True):
            _same([of_a, of_b], [2 * value(a) * bool(c), 2 * value(b) * (not c)])


# Clipping by a norm. --------------------------------------------------------------------------


def _written_out(grads, largest=1.0):
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: jnp.where(norm < largest, g, g / norm * largest), grads)


def _by_factor(grads, largest=1.0):
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    factor = jnp.minimum(1.0, largest / norm)
    return jax.tree.map(lambda g: g * factor, grads)


def _optax(grads, wrap=lambda clip, sgd, low: clip):
    optax = pytest.importorskip("optax")
    clip = optax.clip_by_global_norm(1.0)
    optimizer = wrap(clip, optax.sgd(1.0), jsa.optim.low_precision)
    params = jax.tree.map(jnp.ones_like, grads)
    return optimizer.update(grads, optimizer.init(params), params)[0]


def _chained(wrap):
    import optax  # the functions are not called without it

    return functools.partial(_optax, wrap=functools.partial(wrap, optax.chain))


CLIPS = {
    "written out": _written_out,
    "by a factor": _by_factor,
    "optax": _optax,
    "optax around low_precision": lambda g: _negative(
        _chained(lambda chain, clip, sgd, low: chain(clip, low(sgd)))(g)
    ),
    "optax inside of low_precision": lambda g: _negative(
        _chained(lambda chain, clip, sgd, low: low(chain(clip, sgd)))(g)
    ),
}


def _negative(tree):
    return jax.tree.map(jnp.negative, tree)


@every_kind
@every_dtype
@pytest.mark.parametrize("name", CLIPS)
def test_clipping_by_the_norm_of_gradients_of_any_size(name, dtype, kind):
    if "optax" in name:
        pytest.importorskip("optax")
    rows = [
        (
            {
                "w": _normal((4, 3), size, dtype, kind),
                "b": _normal(3, size / 64, dtype, kind, 1),
            },
        )
        for size in SIZES
    ]
    want = [_expected(_by_factor, *row) for row in rows]
    for results in all_outcomes(CLIPS[name], rows):
        for got, expected, size in zip(results, want, SIZES, strict=True):
            _near(got, expected, dtype, note=f"gradients of {size}")


# Guards of roots and quotients. ---------------------------------------------------------------


def _safe_norm(x, axis=None):
    squares = jnp.sum(x * x, axis, keepdims=axis is not None)
    zero = squares == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, squares)))


def _safe_log(x, axis=None):
    total = jnp.sum(jnp.abs(x), axis, keepdims=axis is not None)
    return jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1.0)), 0.0)


def _over_sum(x, axis=None):
    total = jnp.sum(jnp.abs(x), axis, keepdims=axis is not None)
    return x / jnp.where(total == 0, 1.0, total)


def _over_norm(x, axis=None):
    norm = _safe_norm(x, axis)
    return x / jnp.where(norm == 0, 1.0, norm)


def _over_largest(x, axis=None):
    largest = jnp.max(jnp.abs(x), axis, keepdims=axis is not None)
    return jnp.where(largest == 0, 0.0, x / jnp.where(largest == 0, 1.0, largest))


# Each with the power of x that it computes on its way: what is beyond float32 is no number.
GUARDS = {
    "safe norm": (_safe_norm, 2),
    "logarithm": (_safe_log, 1),
    "over the sum": (_over_sum, 2),
    "over the norm": (_over_norm, 2),
    "over the largest": (_over_largest, 2),
}
EXPONENTS = [-100, -50, -24, 0, 24, 40, 61]


def _guarded(name, axis):
    guard, _ = GUARDS[name]
    weights = np.linspace(-1.0, 2.0, 12).reshape(3, 4)

    def function(x):
        """The value, and the gradient of its elements' weighted sum."""

        def weighted(x):
            out = guard(x, axis)
            return jnp.sum(out * weights.astype(out.dtype)) if out.ndim else out

        return guard(x, axis), jax.grad(weighted)(x)

    return function


@every_kind
@every_dtype
@pytest.mark.parametrize("axis", [None, 1, 0])
@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_of_zero_leaves_other_numbers_alone(name, axis, dtype, kind):
    degree = GUARDS[name][1]
    numbers = np.random.default_rng(0).normal(size=(3, 4))
    numbers = np.sign(numbers) * (np.abs(numbers) + 0.25)
    exponents = [e for e in EXPONENTS if abs(e) < 125 / degree]
    if axis is not None and dtype == "float16":  # what is chosen among elements has one scale
        exponents = [e for e in (-16, -8, *exponents) if e >= -16]
    if name != "safe norm":  # the gradient is of the inverse size
        exponents = [e for e in exponents if abs(e) * degree < 120]
    rows = [(scaled(numbers * 2.0**e, 2.0**e, dtype, kind),) for e in exponents]
    function = _guarded(name, axis)
    want = [_expected(function, *row) for row in rows]
    for results in all_outcomes(function, rows):
        for got, expected, exponent in zip(results, want, exponents, strict=True):
            _near(got, expected, dtype, 16, f"numbers of 2**{exponent}")


@every_kind
@every_dtype
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_is_there_for_zeros(name, axis, dtype, kind):
    numbers = np.random.default_rng(0).normal(size=(3, 4)) * (axis is not None)
    numbers[1] = 0.0
    exponents = [-8, 0, 8] if dtype == "float16" else [-30, 0, 30]
    rows = [(scaled(numbers * 2.0**e, 2.0**e, dtype, kind),) for e in exponents]
    if axis is None and kind == "dynamic":  # zeros without a scale of their own
        rows.append((jsa.as_scaled_array(jnp.zeros((3, 4), dtype)),))
        exponents.append(0)
    function = _guarded(name, axis)
    want = [_expected(function, *row) for row in rows]
    for results in all_outcomes(function, rows):
        for got, expected, exponent in zip(results, want, exponents, strict=True):
            _near(got, expected, dtype, 16, f"numbers of 2**{exponent}, some of them 0")


@every_dtype
@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_makes_no_nan_of_what_is_beyond_the_range(name, dtype):
    """Squares beyond float32 are inf or 0, and so are norms; none is nan, as in plain JAX."""
    numbers = np.random.default_rng(0).normal(size=(3, 4))
    rows = [(scaled(numbers * 2.0**e, 2.0**e, dtype),) for e in (-124, -100, -80)]
    for results in all_outcomes(GUARDS[name][0], rows):
        for got, (x,) in zip(results, rows, strict=True):
            want = GUARDS[name][0](jnp.asarray(value(x), jnp.float32))
            assert np.isfinite(got).all() or not np.isfinite(want).all()


# The larger and the smaller of two numbers. ---------------------------------------------------

EXTREMES = {
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "lax.max": lax.max,
    "lax.min": lax.min,
    "clip from below": lambda a, b: jnp.clip(a, b, None),
    "clip from above": lambda a, b: jnp.clip(a, None, b),
    "clamp": lambda a, b: lax.clamp(jnp.minimum(a, b), jnp.maximum(a, b), jnp.maximum(a, b)),
    "fmin": jnp.fmin,
    "where": lambda a, b: jnp.where(a > b, a, b),
}


@every_kind
@every_dtype
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_of_two_numbers_are_exact(name, dtype, kind):
    rows = []
    for size in (1e-12, 1e-9, 1e-6, 1e6, 1e9, 1e12):
        for sign in (1, -1):
            a = scaled(1.5 * size * sign, _power(size), dtype, kind)
            b = scaled(1.25, 1.0, dtype, kind)
            rows += [(a, b), (b, a)]
    want = [_expected(EXTREMES[name], *row) for row in rows]
    for results in all_outcomes(EXTREMES[name], rows):
        _same(results, want)


CONSTANTS = {
    "at least 2**-20": lambda a: jnp.maximum(a, 2.0**-20),
    "at most 1": lambda a: jnp.minimum(1.0, a),
    "at most 0.7": lambda a: jnp.minimum(a, 0.7),
    "at least 0.7": lambda a: jnp.maximum(a, 0.7),
    "at most 1, of an inverse": lambda a: jnp.minimum(1.0, 1.0 / a),
    "not negative": lambda a: jnp.maximum(a, 0.0),
    "between": lambda a: jnp.clip(a, -1.0, 1.0),
    "between numbers that are not 0": lambda a: jnp.clip(a, 2.0**-10, 2.0**10),
    "hard sigmoid": lambda a: jnp.minimum(jnp.maximum(a + 3.0, 0.0), 6.0),
}


@every_kind
@every_dtype
@pytest.mark.parametrize("name", CONSTANTS)
def test_extremes_of_a_number_and_a_constant(name, dtype, kind):
    sizes = [2.0**e for e in (-40, -30, -20, -8, 0, 8, 20, 30, 40)]
    rows = [(scaled(sign * size, size, dtype, kind),) for size in sizes for sign in (1, -1)]
    want = [_expected(CONSTANTS[name], *row) for row in rows]
    for results in all_outcomes(CONSTANTS[name], rows):
        for got, expected, (x,) in zip(results, want, rows, strict=True):
            _near(got, expected, dtype, 2, str(x))


@every_kind
@every_dtype
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_was_not_chosen_changes_no_scale(name, dtype, kind):
    """A gradient divides ones by the choice. Their quotient by the constant is not among them."""

    def function(a):
        chosen, ones = CONSTANTS[name](a), jnp.ones(3, a.dtype)
        return ones / chosen, ones * chosen

    rows = [(scaled(2.0**e, 2.0**e, dtype, kind),) for e in (-40, -20, -8, 0, 8, 20, 40)]
    want = [_expected(function, *row) for row in rows]
    for results in all_outcomes(function, rows):
        for got, expected, (x,) in zip(results, want, rows, strict=True):
            _near(got, expected, dtype, 2, str(x))


# One of many. ---------------------------------------------------------------------------------


def _halves(x):
    """The steps of a loop, each 2**-10 of the one before."""
    return lax.scan(lambda c, _: (c * 2.0**-10, c), x, None, length=5)[1]


STACKS = {
    "stack": lambda i, a, b, c: jnp.stack([a, b, c])[i],
    "stack, last axis": lambda i, a, b, c: jnp.stack([a, b, c], -1)[..., i],
    "dynamic_index_in_dim": lambda i, a, b, c: lax.dynamic_index_in_dim(
        jnp.stack([a, b, c]), i, keepdims=False
    ),
    "take": lambda i, a, b, c: jnp.take(jnp.stack([a, b, c]), i, axis=0),
    "concatenate": lambda i, a, b, c: lax.dynamic_slice_in_dim(
        jnp.concatenate([a, b, c]), 3 * i, 3
    ),
    "switch": lambda i, a, b, c: lax.switch(i, [lambda: a, lambda: b, lambda: c]),
    "select_n": lambda i, a, b, c: lax.select_n(i, a, b, c),
    "choose": lambda i, a, b, c: jnp.where(i == 0, a, jnp.where(i == 1, b, c)),
    "in a loop": lambda i, a, b, c: lax.fori_loop(
        0, i + 1, lambda k, _: jnp.stack([a, b, c])[k], a
    ),
}


@every_kind
@every_dtype
@pytest.mark.parametrize("name", STACKS)
def test_one_of_several_arrays_is_exact(name, dtype, kind):
    if dtype == "float16" and name not in ("switch", "select_n", "choose"):
        dtype = "bfloat16"  # an array has one scale, also if it is joined of several
    arrays = [_normal((3, 4), size, dtype, kind, k) for k, size in enumerate((1e-9, 1.0, 1e6))]
    rows = [(jnp.int32(i), *arrays) for i in range(3)]
    for results in all_outcomes(STACKS[name], rows):
        _same(results, arrays)


@every_kind
@every_dtype
def test_one_step_of_a_loop_is_exact(dtype, kind):
    x = _normal((3, 4), 1.0, dtype, kind)
    rows = [(jnp.int32(i), x) for i in range(5)]
    want = [value(x) * 2.0 ** (-10 * i) for i in range(5)]
    for function in (
        lambda i, x: _halves(x)[i],
        lambda i, x: lax.dynamic_index_in_dim(_halves(x), i, keepdims=False),
        lambda i, x: _halves(x)[jnp.stack([i, i])][1],
    ):
        for results in all_outcomes(function, rows):
            _same(results, want)


@every_dtype
def test_one_item_of_a_stack_with_a_scale_each_is_exact(dtype):
    items = [_normal((3, 4), size, dtype, "dynamic", k) for k, size in enumerate((1e-9, 1.0, 1e6))]
    stacked = jsa.ScaledArray(
        jnp.stack([x.data for x in items]), jnp.stack([x.scale for x in items])[:, None, None]
    )
    rows = [(jnp.int32(i), stacked) for i in range(3)]
    for results in all_outcomes(lambda i, x: x[i], rows):
        _same(results, items)
    for results in all_outcomes(lambda i, x: lax.map(lambda k: x[k], jnp.stack([i, i]))[0], rows):
        _same(results, items)


# A step that is skipped. ----------------------------------------------------------------------


def _step(params, grads):
    new = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, params)


@every_kind
@every_dtype
@pytest.mark.parametrize("factor", [1.0, 1e-9, 1e9])
def test_a_step_that_is_skipped_leaves_the_parameters(dtype, kind, factor):
    params = {
        "w": _normal((3, 4), 1.0, dtype, kind),
        "b": _normal(4, 1e-9, dtype, kind, 1),
        "s": scaled(1.5e-3, 2.0**-10, dtype, kind),
    }
    size = jax.tree.map(
        lambda p: factor * float(np.max(np.abs(value(p)))), params, is_leaf=is_scaled
    )
    grads = {k: _normal(params[k].shape, size[k], dtype, kind, 2 + n) for n, k in enumerate(params)}
    broken = dict(grads, b=jsa.ScaledArray(grads["b"].data.at[1].set(jnp.inf), grads["b"].scale))
    spoilt = dict(grads, w=jsa.ScaledArray(grads["w"].data * jnp.nan, grads["w"].scale))
    rows = [(params, grads), (params, broken), (params, spoilt)]
    for taken, *skipped in all_outcomes(_step, rows):
        for result in skipped:
            _same(result, params)
        _near(taken, _expected(_step, params, grads), dtype)


# Training. ------------------------------------------------------------------------------------


def _loss(params, x, y):
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean(jnp.square((hidden @ params["out"] - y).astype(jnp.float32)))


def _train(make, factor, kind, steps=60):
    """The loss without its factor, before and after."""
    optax = pytest.importorskip("optax")
    clip, adamw = optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-20)
    rng = np.random.default_rng(0)
    params = {
        "in": rng.normal(size=(4, 16)) / 2,
        "bias": np.zeros(16),
        "out": rng.normal(size=(16, 1)) / 4,
    }
    x = rng.normal(size=(64, 4))
    y = np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    low = jsa.optim.low_precision if kind != "float32" else lambda optimizer: optimizer
    optimizer = make(optax.chain, clip, adamw, low)
    dtype = jnp.float32 if kind == "float32" else jnp.float16

    def step(state, x, y):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda *args: _loss(*args) * factor)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (jsa.optim.apply_updates(params, updates), opt_state), loss

    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    x, y = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
    if kind != "float32":
        params = jsa.as_scaled_array(params, scale="rms", dtype=dtype)
    state = (params, optimizer.init(params))
    if kind != "float32":
        state, step = jsa.as_scaled_array(state), jsa.scalify(step)
    step, losses = jax.jit(step), []
    for k in range(steps):
        if k == 5 and kind == "frozen":
            state = jsa.freeze_scales(state)
        state, loss = step(state, x, y)
        losses.append(float(loss) / factor)
    return losses[0], losses[-1]


PLACES = {
    "around": lambda chain, clip, adamw, low: chain(clip, low(adamw)),
    "inside": lambda chain, clip, adamw, low: low(chain(clip, adamw)),
}


@functools.cache
def _in_float32(factor):
    return _train(PLACES["inside"], factor, "float32")


@every_kind
@pytest.mark.parametrize("factor", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("place", PLACES)
def test_clipped_gradients_train_whatever_the_loss_is_multiplied_by(place, factor, kind):
    first, last = _train(PLACES[place], factor, kind)
    _, want = _in_float32(factor)
    assert np.isfinite(last) and last < first / 2
    np.testing.assert_allclose(last, want, rtol=0.05)
