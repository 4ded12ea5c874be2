"""Scales along axes stay, in every operation that does not mix the axes; most results are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify import ScaledArray
from tests.helpers import in_one_program, leaves

pytestmark = [
    pytest.mark.usefixtures("every_primitive_has_a_rule"),
    pytest.mark.sampled(10),
]

DTYPES = ("float16", "float32", "bfloat16")
IDX = np.array([2, 0, 3, 0], np.int32)
NARROW_FIRST = [pytest.param(d, marks=() if d == "float16" else pytest.mark.full) for d in DTYPES]
# float16 holds 2**-24 at the least: a channel at the scale of another one would be 0.
SCALES = {
    "rows": 2.0 ** np.array([[0], [-28], [3], [-27]]),
    "columns": 2.0 ** np.array([[-29, 0, -14, 3, -28, 1]]),
    "both": 2.0 ** (-np.arange(24).reshape(4, 6) * 7 % 30),
}


def scaled(seed, scale, dtype, shape=(4, 6)):
    """Small multiples of 1/8: their sums are exact in every dtype."""
    rng = np.random.default_rng(seed)
    data = rng.integers(1, 16, size=shape) * rng.choice([-1, 1], size=shape) / 8
    return ScaledArray(jnp.asarray(data, dtype), jnp.asarray(scale, jnp.float32))


def value(x):
    return jnp.asarray(x.to_array(jnp.float32))


def check_exact(fun, *args, jit=True):
    """Compare with the plain function of the float32 values, and return the scales."""
    if not jit:
        return _compared(jsa.scalify(fun)(*args), fun, args)
    [shapes] = check_all_exact([fun], [args])
    return shapes


def check_all_exact(functions, rows):
    """Compare functions of each row of operands, compiled together; return the shapes of each."""
    scalified = [jsa.scalify(fun) for fun in functions]
    results = in_one_program(lambda *args: [fun(*args) for fun in scalified], rows)
    return [
        _compared(out, fun, row)
        for outs, row in zip(results, rows, strict=True)
        for out, fun in zip(outs, functions, strict=True)
    ]


def _compared(result, fun, args):
    outputs, expected = leaves(result), leaves(fun(*map(value, args)))
    for out, want in zip(outputs, expected, strict=True):
        got = value(out) if isinstance(out, ScaledArray) else out
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)
    return [np.shape(getattr(out, "scale", None)) for out in outputs]


def _fill(x, *index, number):
    return x.at[index].get(mode="fill", fill_value=number)


# Functions that put elements elsewhere, and the shape of a scale along columns, then along rows.
MOVES = {
    "column": (lambda x: x[:, 1], (), (4,)),
    "row": (lambda x: x[1], (6,), ()),
    "strided": (lambda x: x[::2, 1:5:2], (1, 2), (2, 1)),
    "traced-row": (lambda x: x[jnp.argmax(jnp.abs(x[:, 0]) * 0)], (6,), ()),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, IDX[:2], (2, 3)), (1, 3), (2, 1)),
    "flip": (lambda x: x[::-1, ::-1], (1, 6), (4, 1)),
    "roll-rows": (lambda x: jnp.roll(x, 1, 0), (1, 6), (4, 1)),
    "roll-columns": (lambda x: jnp.roll(x, 2, 1), (1, 6), (4, 1)),
    "transpose": (lambda x: x.T, (6, 1), (1, 4)),
    "pad": (lambda x: jnp.pad(x, 1), (1, 8), (6, 1)),
    "pad-negative": (
        lambda x: lax.pad(x, jnp.zeros((), x.dtype), ((-1, 2, 1), (1, -2, 0))),
        (1, 5),
        (8, 1),
    ),
    "pad-inf": (lambda x: jnp.pad(x, 1, constant_values=jnp.inf), (1, 8), (6, 1)),
    "split": (lambda x: jnp.split(x, [0, 1, 3], 1)[2:], None, None),
    "unstack": (lambda x: jnp.unstack(x, axis=1), None, None),
    "unstack-rows": (lambda x: jnp.unstack(x), None, None),
    "tile": (lambda x: jnp.tile(x, (2, 3)), (1, 18), (8, 1)),
    "repeat": (lambda x: jnp.repeat(x, 2, 1), (1, 12), (4, 1)),
    "concatenate-zeros": (lambda x: jnp.concatenate([x, 0 * x[:2]]), None, None),
    "concatenate-zeros-1": (lambda x: jnp.concatenate([jnp.zeros((4, 1)), x], 1), (1, 7), (4, 1)),
    "gather-rows": (lambda x: x[IDX], (1, 6), (4, 1)),
    "gather-columns": (lambda x: x[:, IDX], (1, 4), (4, 1)),
    "gather-elements": (lambda x: x[IDX, IDX], (4,), (4,)),
    "gather-outer": (lambda x: x[IDX[:, None], IDX[:2]], (4, 2), (4, 2)),
    "gather-clip": (lambda x: jnp.take(x, np.array([1, 9]), 1, mode="clip"), (1, 2), (4, 1)),
    "gather-nan": (lambda x: jnp.take(x, np.array([1, 9]), 1), (1, 2), (4, 1)),
    "gather-zero": (lambda x: _fill(x, np.array([1, 9]), number=0.0), (1, 6), (2, 1)),
    "take_along_axis": (lambda x: jnp.take_along_axis(x, IDX[:, None], 1), (4, 1), (4, 1)),
    "vmap-gather": (lambda x: jax.vmap(lambda row, i: row[i])(x, IDX), (4,), (4,)),
    "vmap-gather-1": (lambda x: jax.vmap(lambda c: c[IDX], 1, 1)(x), (1, 6), (4, 1)),
    "vmap-slice": (
        lambda x: jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (2,)))(x, IDX),
        (4, 2),
        (4, 1),
    ),
    "set-zero": (lambda x: x.at[:, 1].set(0), (1, 6), (4, 1)),
    "cummax": (lambda x: lax.cummax(x, 0, reverse=True), (1, 6), None),
    "sort": (lambda x: jnp.sort(x, 0), (1, 6), None),
    "top_k": (lambda x: lax.top_k(x.T, 2)[0], (6, 1), None),
    "max_pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"),
        (1, 6),
        None,
    ),
    "multiply": (lambda x: x.at[IDX].multiply(2), (1, 6), (4, 1)),
}
MIX_ROWS = ("cummax", "sort", "top_k", "max_pool")


@pytest.mark.sampled(32)
@pytest.mark.filterwarnings("ignore::jax_scalify.DequantisedWarning")
@pytest.mark.parametrize("dtype", NARROW_FIRST)
@pytest.mark.parametrize("name", MOVES)
def test_what_moves_elements_moves_their_scales(name, dtype):
    fun, columns, rows = MOVES[name]
    shapes = {"columns": columns, "rows": rows, "both": None}
    kinds = [k for k in shapes if k == "columns" or name not in MIX_ROWS]
    found = check_all_exact([fun], [(scaled(0, SCALES[k], dtype),) for k in kinds])
    for kind, got in zip(kinds, found, strict=True):
        assert shapes[kind] is None or got == [shapes[kind]]


@pytest.mark.parametrize("name", ["row", "pad", "gather-columns", "set-zero", "roll-columns"])
def test_outside_of_jit(name):
    check_exact(MOVES[name][0], scaled(0, SCALES["columns"], "float16"), jit=False)


# Functions that bring two arrays of the same scales together, and along what scales may lie.
UPDATES = {
    "concatenate": (lambda x, y: jnp.concatenate([x, y]), "columns rows"),
    "concatenate-1": (lambda x, y: jnp.concatenate([x, y], 1), "columns rows both"),
    "concatenate-pieces": (lambda x, y: jnp.concatenate([x[:, 3:], y[:, :3]], 1), "columns both"),
    "stack": (lambda x, y: jnp.stack([x, y], 1), "columns rows both"),
    "update-rows": (
        lambda x, y: lax.dynamic_update_slice(x, y[:2], (IDX[0], 0)),
        "columns rows both",
    ),
    "update-columns": (
        lambda x, y: lax.dynamic_update_slice(x, y[:, :2], (0, IDX[0])),
        "columns rows both",
    ),
    "update-zeros": (
        lambda x, y: lax.dynamic_update_slice(jnp.zeros_like(x), y[:2], (IDX[0], 0)),
        "columns rows both",
    ),
    "set-row": (lambda x, y: x.at[1].set(y[2]), "columns rows both"),
    "set-column": (lambda x, y: x.at[:, 1].set(y[:, 2]), "columns rows both"),
    "set-rows": (lambda x, y: x.at[IDX[:3]].set(y[:3]), "columns rows both"),
    "set-columns": (lambda x, y: x.at[:, IDX[:3]].set(y[:, :3]), "columns rows both"),
    "set-element": (lambda x, y: x.at[IDX[:3], IDX[:3]].set(y[1, :3]), "both"),
    "set-dropped": (
        lambda x, y: x.at[np.array([1, 9])].set(y[:2], mode="drop"),
        "columns rows both",
    ),
    "vmap-set": (
        lambda x, y: jax.vmap(lambda row, i, u: row.at[i].set(u))(x, IDX, y[:, 0]),
        "rows both",
    ),
    "vmap-add": (
        lambda x, y: jax.vmap(lambda row, i, u: row.at[i].add(u))(x, IDX, y[:, 0]),
        "rows",
    ),
    "add": (lambda x, y: x.at[IDX].add(y), "columns"),
    "add-columns": (lambda x, y: x.at[:, IDX].add(y[:, :4]), "rows"),
    "subtract": (lambda x, y: x.at[IDX].subtract(y), "columns"),
    "max": (lambda x, y: x.at[IDX].max(y), "columns"),
    "min": (lambda x, y: x.at[:, IDX].min(y[:, :4]), "rows"),
    "grad-gather": (
        lambda x, y: jax.grad(lambda v: jnp.sum(v[IDX] * y))(x),
        "columns",
    ),
    "grad-gather-columns": (
        lambda x, y: jax.grad(lambda v: jnp.sum(v[:, IDX[:3]] * y[:, IDX[:3]]))(x),
        "columns rows both",
    ),
    "grad-column": (
        lambda x, y: jax.grad(lambda v: jnp.sum(v[:, 1] * y[:, 0]))(x),
        "columns rows",
    ),
    "grad-slice": (
        lambda x, y: jax.grad(lambda v: jnp.sum(v[:, 1:3] * y[:, 1:3]))(x),
        "columns rows both",
    ),
    "grad-roll": (
        lambda x, y: jax.grad(lambda v: jnp.sum(jnp.roll(v, 1, 1) * jnp.roll(y, 1, 1)))(x),
        "columns rows",
    ),
    "grad-where-concatenate": (
        lambda x, y: jax.grad(lambda v: jnp.sum(jnp.concatenate([v, y], 1)[:, :6] * y))(x),
        "columns rows both",
    ),
    "grad-pad": (
        lambda x, y: jax.grad(lambda v: jnp.sum(jnp.pad(v, 1) * jnp.pad(y, 1)))(x),
        "columns rows both",
    ),
    "grad-tile": (
        lambda x, y: jax.grad(lambda v: jnp.sum(jnp.tile(v, (2, 1)) * jnp.tile(y, (2, 1))))(x),
        "columns",
    ),
}


@pytest.mark.parametrize("dtype", NARROW_FIRST)
@pytest.mark.parametrize("name", UPDATES)
def test_what_brings_arrays_together_keeps_their_scales(name, dtype):
    fun, kinds = UPDATES[name]
    rows = []
    for along in kinds.split():
        scale = SCALES[along]
        one = jnp.ones_like(scaled(0, 1, dtype).data) if "grad" in name else None
        x = scaled(0, scale, dtype) if one is None else ScaledArray(one, jnp.float32(1))
        rows.append((x, scaled(1, scale, dtype)))
    check_all_exact([fun], rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [-9, -5, -4, -1, 3, 7])
def test_slices_that_start_outside(start, dtype):
    """JAX adds the length to a negative start once. XLA moves the rest into the array."""
    x, update = scaled(0, SCALES["rows"], dtype), scaled(1, 2.0**5, dtype, (1, 6))
    i = jnp.int32(start)
    check_exact(lambda x: lax.dynamic_slice(x, (i, 0), (2, 6)), x)
    check_exact(lambda x, u: lax.dynamic_update_slice(x, u, (i, 0)), x, update)
    check_exact(jax.grad(lambda x: jnp.sum(lax.dynamic_slice(x, (i, 0), (2, 6)))), x)
    # The start is a number that is known when the function is traced.
    check_exact(lambda x: lax.dynamic_slice(x, (start, 0), (2, 6)), x)
    check_exact(lambda x, u: lax.dynamic_update_slice(x, u, (start, 0)), x, update)


def test_infinity_beside_scales():
    """`-inf` has any scale, so no column takes on the scale of another column."""
    x = ScaledArray(jnp.full((4, 2), 1.25, jnp.float16), jnp.float32([[1, 2.0**-30]]))
    check_exact(lambda x: jax.ops.segment_max(x, np.array([0, 0, 1, 1]), 3), x)
    check_exact(lambda x: jnp.full((5, 2), -jnp.inf, x.dtype).at[1:].set(x), x)
    whole = lambda x: lax.dynamic_update_slice(jnp.full((5, 2), jnp.inf, x.dtype), x, (0, 0))  # noqa: E731
    check_exact(whole, x)


@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_scales_of_updates_that_are_dropped(mode):
    """A window of whole rows is dropped if it begins beside the first column."""
    x = ScaledArray(jnp.ones((3, 2), jnp.float16), jnp.float32([[1], [2], [4]]))
    update = ScaledArray(jnp.ones((1, 2), jnp.float16), jnp.float32(2.0**-10))
    dims = lax.ScatterDimensionNumbers((1,), (0,), (0, 1))
    for column in (0, 1):
        index = np.array([[1, column]])
        check_exact(lambda x, u, i=index: lax.scatter(x, i, u, dims, mode=mode), x, update)


def test_columns_of_a_matrix_with_a_scale_each():
    w = jnp.float32([[1.0, 2.0**-30], [1.5, 2.0**-29]])
    rows = [(jsa.as_scaled_array(w, scale="max", axis=1, dtype=dtype),) for dtype in DTYPES]
    functions = [
        lambda x: x[:, 1],
        lambda x: jnp.concatenate([x, x]),
        lambda x: jnp.concatenate([x, x], 1),
        lambda x: jnp.roll(x, 1, 1),
        lambda x: jnp.roll(x, 1, 0),
        lambda x: jnp.pad(x, 1),
        lambda x: jnp.stack([x, x]),
        lambda x: x[np.array([1, 0])],
        lambda x: x.at[0].set(x[1]),
        lambda x: x.at[0].set(0),
        lambda x: jnp.flip(x),
        lambda x: jnp.split(x, 2),
        lambda x: jnp.sort(x, 0),
        lambda x: jnp.argmin(x),
        lambda x: jnp.argmin(x, 1),
        lambda x: lax.top_k(x, 2)[1],
    ]
    check_all_exact(functions, rows)


def test_elements_of_all_scales_are_compared():
    scales, rows = 2.0 ** jnp.float32([-30, 0, -29, -28]), []
    for dtype in DTYPES:
        data = jnp.asarray([3, 1, -1.5, 1.25], dtype)
        rows += [(ScaledArray(data, scales),), (ScaledArray(data[None], scales[None]),)]
    functions = [
        jnp.argmin,
        jnp.argmax,
        lambda x: jnp.argmin(jnp.abs(x)),
        jnp.argsort,
        lambda x: lax.top_k(x, 4)[1],
        lambda x: lax.top_k(-x, 4)[1],
    ]
    check_all_exact(functions, rows)


def test_elements_that_were_compared_are_multiplied():
    x = scaled(5, 2.0 ** np.array([[-3, 0, -1, 3, -2, 1]]), "float16")
    ones = jnp.ones((3, 1, 2), jnp.float16)
    check_all_exact(
        [lambda x: lax.top_k(x, 2)[0][None] * ones, lambda x: jnp.sort(x)[None, :, :2] * ones],
        [(x,)],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_computed_elements_are_compared(dtype):
    scales = 2.0 ** jnp.float32([-3, 5, 0, -2])
    x = ScaledArray(jnp.asarray([1, 1.5, 1, -1], dtype), scales)
    functions = [
        lambda x: lax.top_k(x * x + x, 2)[0],
        lambda x: lax.top_k(jnp.remainder(x, 3), 2)[0],
        lambda x: jnp.sort(x * x + x)[1:],
        lambda x: lax.cummax(x * x + x),
    ]
    check_all_exact(functions, [(x,)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiple", ["times", "over", "minus"])
def test_multiples_move_with_their_scales(multiple, dtype):
    """The scale of each element goes along, also where the law's scale is another one by now."""
    of = {"times": lambda x: x * 12, "over": lambda x: x / 0.25, "minus": lambda x: -(x * 0.5)}
    moves = [
        lambda x: x.T,
        lambda x: x.reshape(-1),
        lambda x: x[:, 1:4],
        lambda x: x[1:3],
        lambda x: x[::-1, ::-1],
        lambda x: x[IDX],
        lambda x: x[:, None],
        lambda x: lax.broadcast_in_dim(x, (6, 3, 4), (2, 0)) if x.shape == (4, 6) else x,
        lambda x: jnp.concatenate([x, x], 1),
        lambda x: jnp.stack([x, x], 1),
        lambda x: jnp.repeat(x, 2, axis=0),
        lambda x: jnp.pad(x, 1),
        lambda x: x.at[IDX[:2]].set(x[:2]),
        lambda x: jax.vmap(lambda r: r * 2)(x),
        lambda x: lax.scan(lambda c, r: (c, r), 0.0, x)[1],
        lambda x: jnp.abs(x),
    ]
    functions = [lambda x, f=f: f(of[multiple](x)) for f in moves]
    cases = [(scaled(0, SCALES[s], dtype),) for s in ("rows", "columns", "both")]
    check_all_exact(functions, cases)


def test_fill_values_beside_scales():
    scales = 2.0 ** np.array([[-6, 0, -5, 3, -7, 1]])
    functions = [
        lambda x: jnp.pad(x, 1, constant_values=3),
        lambda x: lax.pad(x, x[0, 0], ((1, 0, 1), (0, 2, 0))),
        lambda x: _fill(x, slice(None), np.array([1, 9]), number=3.0),
        lambda x: _fill(x, np.array([1, 9]), number=-np.inf),
        lambda x: jnp.concatenate([x, jnp.full((4, 2), 3, x.dtype)], 1),
        lambda x: x.at[:, 1].set(3),
        lambda x: x.at[1].set(3),
        lambda x: x.at[1].set(-jnp.inf),
        lambda x: lax.dynamic_update_slice(x, jnp.full((4, 2), 3, x.dtype), (0, IDX[0])),
    ]
    check_all_exact(functions, [(scaled(0, scales, dtype),) for dtype in DTYPES])


def test_scales_are_no_larger_than_they_must_be():
    x = scaled(0, SCALES["columns"], "float32")
    y = scaled(1, 4.0, "float32")
    for fun, shape in (
        (lambda x, y: jnp.concatenate([y, y]), ()),
        (lambda x, y: jnp.concatenate([x, y]), (1, 6)),
        (lambda x, y: jnp.concatenate([y, x], 1), (1, 12)),
        (lambda x, y: jnp.stack([y, x]), (1, 1, 6)),
        (lambda x, y: y.at[IDX].set(x), (1, 6)),
        (lambda x, y: jnp.zeros_like(x).at[:, IDX].add(x[:, :4]), (1, 6)),
        (lambda x, y: y.at[IDX, IDX].set(x[0, :4]), ()),  # one for every element, otherwise
        (lambda x, y: x.reshape(24), ()),
        (lambda x, y: x[:, 1] + x[:, 2], ()),
    ):
        assert jsa.scalify(fun)(x, y).scale.shape == shape


@pytest.mark.parametrize("name", ["gather-columns", "pad", "roll-columns", "vmap-gather"])
def test_derivatives_of_scalified_functions(name):
    fun, scale = MOVES[name][0], SCALES["columns"]

    def loss(x, scalified):
        if not scalified:
            return jnp.sum(fun(x) ** 2)
        out = jsa.scalify(fun)(jsa.as_scaled_array(x, jnp.asarray(scale, jnp.float32)))
        return jnp.sum(jsa.asarray(out, jnp.float32) ** 2)

    x = value(scaled(0, scale, "float32"))
    np.testing.assert_array_equal(jax.grad(loss)(x, True), jax.grad(loss)(x, False))


@pytest.mark.parametrize("name", ["add", "set-columns"])
def test_derivatives_of_scalified_updates(name):
    fun, kinds = UPDATES[name]
    scale = jnp.asarray(SCALES[kinds.split()[0]], jnp.float32)

    def loss(x, y, scalified):
        if not scalified:
            return jnp.sum(fun(x, y) ** 2)
        out = jsa.scalify(fun)(jsa.as_scaled_array(x, scale), jsa.as_scaled_array(y, scale))
        return jnp.sum(jsa.asarray(out, jnp.float32) ** 2)

    args = [value(scaled(i, scale, "float32")) for i in (0, 1)]
    for got, want in zip(*(jax.grad(loss, (0, 1))(*args, flag) for flag in (True, False))):
        np.testing.assert_array_equal(got, want)


def test_a_loop_that_writes_rows():
    def fun(x):
        def body(i, rows):
            return rows.at[i].set(x[i] * 2)

        return lax.fori_loop(0, 4, body, jnp.zeros_like(x))

    check_exact(fun, scaled(0, SCALES["columns"], "float16"))


def _steep(shape, axis, sign, dtype):
    """Scales along an axis that cancel against those of the other sign."""
    data = np.random.default_rng(shape[0]).choice([-2, -1, 1, 2], size=shape)
    exponents = np.array([14, -17, 3, -30]).reshape(
        [4 if a == axis else 1 for a in range(len(shape))]
    )
    return ScaledArray(jnp.asarray(data, dtype), jnp.float32(2.0) ** (sign * exponents))


# Products along an axis where one scale is large and the other small, and that axis of each.
CONTRACTIONS = {
    "matmul": (jnp.matmul, ((3, 4), 1), ((4, 5), 0)),
    "vector": (jnp.matmul, ((4,), 0), ((4, 5), 0)),
    "first": (lambda a, b: jnp.einsum("ki,jk->ij", a, b), ((4, 3), 0), ((5, 4), 1)),
    "batch": (lambda a, b: jnp.einsum("bik,kbj->bij", a, b), ((2, 3, 4), 2), ((4, 2, 3), 0)),
    "two axes": (lambda a, b: jnp.tensordot(a, b, 2), ((3, 4, 2), 1), ((4, 2, 3), 0)),
    "scales of a batch": (lambda a, b: jnp.einsum("bk,kb->b", a, b), ((4, 4), 0), ((4, 4), 1)),
    "convolution": (
        lambda a, b: lax.conv(a, b, (1,), "SAME"),
        ((2, 4, 6), 1),
        ((3, 4, 3), 1),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contracted_scales_are_multiplied_first(name, dtype):
    fun, lhs, rhs = CONTRACTIONS[name]
    for sign in 1, -1:
        check_exact(fun, _steep(*lhs, sign, dtype), _steep(*rhs, -sign, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_contracted_scales_at_the_ends_of_their_range(dtype):
    steep = 2.0 ** jnp.float32([100, -100, 0, 3])
    lhs, rhs = _steep((3, 4), 1, 1, dtype).data, _steep((4, 5), 0, -1, dtype).data
    lhs = ScaledArray(lhs.at[1, 0].set(jnp.inf), steep[None])
    check_exact(jnp.matmul, lhs, ScaledArray(rhs, 1 / steep[:, None]))


def test_contracted_scales_beside_others():
    lhs = _steep((3, 4), 1, 1, "float16")
    lhs = ScaledArray(lhs.data, lhs.scale * 2.0 ** jnp.float32([[0], [40], [-40]]))
    rhs = _steep((4, 5), 0, -1, "float16")
    rhs = ScaledArray(rhs.data, rhs.scale * 2.0 ** jnp.float32([[0, 20, -20, 30, -30]]))
    assert check_exact(jnp.matmul, lhs, rhs) == [(3, 5)]
    zeros = ScaledArray(rhs.data.at[0].set(0), rhs.scale.at[0].set(0))
    assert check_exact(jnp.matmul, lhs, zeros) == [(3, 5)]
    check_exact(jnp.matmul, ScaledArray(lhs.data[:, :0], lhs.scale[:, :0]), zeros_of(rhs))


def zeros_of(x):
    return ScaledArray(x.data[:0], x.scale[:0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_diagonal_keeps_a_scale_an_element(dtype):
    x, places = scaled(0, 2.0 ** np.array([20, -20, 3]), dtype, (3,)), np.array([2, 0, 1])
    assert check_exact(lambda x: jnp.zeros((3, 3), x.dtype).at[places, places].add(x), x)
    assert check_exact(jnp.diag, x)
    steep = 2.0 ** np.array([0, 20, -20])
    square = scaled(1, steep[:, None] * steep, dtype, (3, 3))

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(x * jnp.diag(x)[:, None]))(x)

    got, want = value(jsa.scalify(gradient)(square)), gradient(value(square))
    np.testing.assert_allclose(got, want, rtol=2 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradient_of_a_correlation_of_rows_of_all_magnitudes(dtype):
    data = [[1, -1, 1, 1], [-3, 1, -1, -1], [-1, -2, 1, -3]]
    x = ScaledArray(jnp.asarray(data, dtype), 2.0 ** jnp.float32([[4], [14], [-17]]))
    weight = np.float32([[1, 2, 3], [4, 5, 6], [7, 8, 10]])

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.corrcoef(x) * weight.astype(x.dtype)))(x)

    got, want = value(jax.jit(jsa.scalify(gradient))(x)), gradient(value(x))
    error = jnp.max(jnp.abs(got - want), 1) / jnp.max(jnp.abs(want), 1)
    assert np.all(error < 16 * jnp.finfo(dtype).eps)
