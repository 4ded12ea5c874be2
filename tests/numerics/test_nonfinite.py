"""The first nan or infinity, at the line that makes it."""

import functools
import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify.numerics import find_nonfinite

F16 = jnp.float16


def softmax(x):
    exponentials = jnp.exp(x)  # fault
    return exponentials / jnp.sum(exponentials, -1, keepdims=True)


def normalise(x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True))  # fault


def entropy(p):
    return -jnp.sum(p * jnp.log(p))  # fault


def layer_norm(x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + F16(1e-8))
    return centred / deviation  # fault


def linear(w, batch):
    return jnp.mean(batch["x"] @ w)  # fault


def fp8_cast(x):
    narrow = x.astype(jnp.float8_e4m3fn)  # fault
    return narrow.astype(jnp.float32) * 2


def scan_body(x):
    table = np.float32([1.0, 2.0, np.inf])

    def body(carry, index):
        carry = carry * jnp.asarray(table)[index]  # fault
        return carry - carry / 2, carry

    return lax.scan(body, x, jnp.arange(3))


def length(x):
    return jnp.sqrt(jnp.sum(x**2))  # fault


X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
CONSTANT_ROWS = np.ones((4, 8), np.float32)

# name: function, arguments, primitive, kind, a word of the remedy
FAULTS = {
    "softmax": (softmax, (X * 100,), "exp", "inf", "subtract the maximum"),
    "normalise": (normalise, (CONSTANT_ROWS,), "div", "nan", "divisors are 0"),
    "log of 0": (entropy, (np.float32([0.5, 0.5, 0.0]),), "log", "inf", "logarithm of 0"),
    "lost eps": (layer_norm, (F16(CONSTANT_ROWS),), "div", "nan", "epsilon that is added is 0"),
    "batch": (
        linear,
        (X.T, {"x": np.where(X > 1, np.inf, X)}),
        "dot_general",
        "inf",
        "args[1]['x']",
    ),
    "fp8 cast": (fp8_cast, (X * 1000,), "convert_element_type", "nan", "scale it first"),
    "scan body": (scan_body, (X[0],), None, "inf", "constant"),
    "sqrt'(0)": (jax.grad(length), (np.zeros(3, np.float32),), None, "inf", "derivative of a root"),
}


def line_of_fault(fun):
    fun = inspect.unwrap(fun)
    lines, first = inspect.getsourcelines(fun)
    (found,) = [first + i for i, line in enumerate(lines) if "# fault" in line]
    return found


WAYS = {
    "plain": lambda fun: fun,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "twice": lambda fun: jax.jit(lambda *args: jax.jit(fun)(*args)),
    "scan": lambda fun: lambda *args: lax.scan(lambda c, _: (c, fun(*args)), 0, None, length=2)[1],
    "cond": lambda fun: lambda *args: lax.cond(True, fun, fun, *args),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found_at_their_lines(name, way):
    fun, args, primitive, kind, word = FAULTS[name]
    found = find_nonfinite(WAYS[way](fun))(*args)
    assert found is not None and found.reaches_result
    assert f"test_nonfinite.py:{line_of_fault(fun)}" in found.line, str(found)
    assert found.kind == kind
    assert primitive in (None, found.primitive)
    assert word in str(found)
    assert found.count > 0 and found.operands


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "sqrt'(0)"])
def test_planted_faults_of_functions_that_are_differentiated(name):
    fun, args, _, _, word = FAULTS[name]

    def loss(*args):
        return sum(jnp.sum(out.astype(jnp.float32)) for out in jax.tree.leaves(fun(*args)))

    found = find_nonfinite(jax.jit(jax.value_and_grad(loss)))(*args)
    assert f"test_nonfinite.py:{line_of_fault(fun)}" in found.line, str(found)
    assert word in str(found)


@pytest.mark.parametrize("name", ["softmax", "normalise", "log of 0", "batch"])
@pytest.mark.parametrize("transform", [jsa.scalify, lambda f: jax.jit(jsa.scalify(f))])
def test_planted_faults_of_scalified_functions(name, transform):
    fun, args, primitive, kind, _ = FAULTS[name]
    found = find_nonfinite(transform(fun))(*jsa.as_scaled_array(args, scale=1.0))
    assert f"test_nonfinite.py:{line_of_fault(fun)}" in found.line, str(found)
    assert found.primitive == primitive and found.kind == kind
    scaled = [o for o in found.operands if o.scale is not None]
    assert scaled and "scale 2^" in str(found)
    if name == "batch":
        assert found.argument == "args[1]['x']"


def test_the_epsilon_that_float16_loses_is_kept_by_scalify():
    fun, args, *_ = FAULTS["lost eps"]

    def with_epsilon(x):
        centred = x - jnp.mean(x, -1, keepdims=True)
        return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)

    assert find_nonfinite(jsa.scalify(with_epsilon))(*jsa.as_scaled_array(args)) is None


def test_a_step_with_an_optimizer():
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(1e-3)

    def update(w, state, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.log(x @ w)))(w)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w = np.ones((8, 2), np.float32)
    found = find_nonfinite(jax.jit(update))(w, optimizer.init(w), np.zeros((4, 8), np.float32))
    assert "test_nonfinite.py" in found.line and found.phase in ("forward", "backward")

    def overflow(w, state, x):
        grads = jax.grad(lambda w: jnp.sum(x @ w))(w)
        return optax.apply_updates(w, jax.tree.map(jnp.log, grads))

    found = find_nonfinite(overflow)(w, None, np.zeros((4, 8), np.float32))
    assert found.phase == "update" and "`log`" in str(found) and "(update)" in str(found)


def masked_softmax(x, mask):
    return jax.nn.softmax(jnp.where(mask, x, -jnp.inf), -1)


def test_masks_are_no_fault():
    assert find_nonfinite(masked_softmax)(X, X > -1) is None


@pytest.mark.parametrize("scaled", [False, True])
def test_finite_masks_that_become_infinite_are_no_fault(scaled):
    """float16 has no number below its lowest, less the maximum."""
    x = np.float16([[900.0, 1000.0, -3.0]])

    def fun(x):
        lowest = jnp.finfo(x.dtype).min
        return jax.nn.softmax(jnp.where(x > 0, x, lowest), -1)

    assert jnp.isneginf(jnp.finfo(jnp.float16).min - jnp.max(x))
    if scaled:
        assert find_nonfinite(jsa.scalify(fun))(jsa.as_scaled_array(x)) is None
    else:
        assert find_nonfinite(fun)(x) is None


def test_a_row_that_is_masked_entirely():
    found = find_nonfinite(masked_softmax)(X, np.zeros_like(X, bool))
    assert found.kind == "nan" and "masked entirely" in found.remedy


def test_an_infinity_that_no_result_depends_on():
    def fun(x):
        return jnp.where(x > 0, jnp.log(x), 0.0)

    found = find_nonfinite(fun)(np.float32([1.0, 0.0]))
    assert not found.reaches_result and found.primitive == "log"
    assert "No result" in str(found)


def test_everything_is_finite():
    assert find_nonfinite(lambda x: jnp.tanh(x) @ x.T)(X) is None
    assert find_nonfinite(lambda x: x)(np.zeros((0, 3), np.float32)) is None


def test_loops_name_the_iteration():
    def fun(x):
        return lax.fori_loop(0, 200, lambda i, x: x * 2, x)

    found = find_nonfinite(fun)(np.float32(1.0))
    assert found.iterations == (127,) and found.primitive == "mul"
    scanned = find_nonfinite(lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=200))
    assert scanned(np.float32(1.0)).iterations == (127,)


def test_a_long_chain_of_nans_is_followed():
    def fun(x):
        return lax.fori_loop(0, 3000, lambda i, x: x + 1, jnp.log(x))

    found = find_nonfinite(fun)(np.float32(-1.0))
    assert found.primitive == "log" and "negative" in found.remedy


def test_complex_and_narrow_dtypes():
    found = find_nonfinite(lambda x: 1 / x)(np.complex64([1 + 1j, 0]))
    assert found.primitive == "div"
    x = np.array([1.0, 400.0], ml_dtypes.float8_e4m3fn)
    found = find_nonfinite(lambda x: x.astype(F16) * F16(1000))(x)
    assert found.primitive == "mul" and "overflows float16" in found.remedy


def test_what_is_no_function():
    with pytest.raises(TypeError, match="`fun` must be callable, got int"):
        find_nonfinite(3)


def test_functions_with_static_arguments():
    fun = functools.partial(lambda x, mode: x / 0 if mode == "bad" else x, mode="bad")
    assert find_nonfinite(fun)(X).primitive == "div"


def test_remedies_speak_of_values():
    """At a scale of 2^1 the data of 13.2 is 6.6: it is 13.2 that overflows."""
    x = jsa.ScaledArray(jnp.float16([6.6, 0.5]), jnp.float32(2))
    found = find_nonfinite(jsa.scalify(jnp.exp))(x)
    assert "the exponential of 13.2 overflows float16 (at 11.1)" in found.remedy
    assert "scale 2^1: 2 elements, data of 0.5 to 6.6" in str(found)
    rows = jsa.ScaledArray(jnp.float16([[1, 1], [2, 8]]), jnp.float32([[64], [2]]))
    assert "exponential of 64 " in find_nonfinite(jsa.scalify(jnp.exp))(rows).remedy
    for fun, limit in ((jnp.exp2, 16), (jnp.sinh, 11.8), (jnp.expm1, 11.1)):
        assert f"(at {limit})" in find_nonfinite(fun)(F16([20])).remedy
    cast = find_nonfinite(jsa.scalify(lambda x: x.astype(F16)))
    found = cast(jsa.ScaledArray(jnp.float32([2.5e5]), jnp.float32(4)))
    assert "the data of 1e+06 is 2.5e+05 at its scale, beyond float16" in found.remedy


def test_a_constant_that_the_dtype_makes_infinite():
    table = np.float32([1, 2])

    def fun(x):
        return x * F16(70000)

    with np.errstate(over="ignore"):
        found = find_nonfinite(fun)(F16(table))
    assert found.constant and "float16 (largest 65504) has made it infinite" in found.remedy
    wide = find_nonfinite(lambda x: x * np.float32(np.inf))(table)
    assert wide.remedy == "replace the constant by a finite one, or mask what it meets."
