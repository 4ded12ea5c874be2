"""A row for every value: where it was made, its scale, and what a dtype makes of it."""

import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jax_scalify as jsa
from jax_scalify.numerics import report, suggest
from jax_scalify.numerics.host_statistics import Fit, Measure, measure

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 16)).astype(np.float32)
W = RNG.normal(size=(16, 4)).astype(np.float32)
FORMATS = ("float16", "float8_e5m2")


def loss(w, x):
    with jax.named_scope("layer"):
        h = jnp.tanh(x @ w)
    return jnp.mean(h**2)


def update(w, x):
    value, grads = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * grads, value


# What is measured


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn],
)
def test_measures_of_every_dtype(dtype):
    values = np.array([0.0, 1.0, -2.0, 0.5, 0.25], dtype)
    m = measure(values)
    assert (m.size, m.zeros, m.nans, m.infs, m.masks) == (5, 1, 0, 0, 0)
    assert (m.largest, m.smallest) == (2.0, 0.25)
    assert math.isclose(m.log2_rms, math.log2((1 + 4 + 0.25 + 0.0625) / 5) / 2)
    assert m.histogram == {-2: 1, -1: 1, 0: 1, 1: 1}


@pytest.mark.parametrize("name", FORMATS + ("bfloat16", "float8_e4m3fn"))
def test_fits_are_those_of_a_cast(name):
    dtype = jnp.dtype(name)
    exponents = RNG.integers(-160, 60, 4000)
    values = np.float32(RNG.normal(size=4000) * 2.0 ** exponents.astype(np.float64))
    finfo = jnp.finfo(dtype)
    found = measure(values).fits[name]
    size = np.abs(values[(values != 0) & (np.abs(values) < float(finfo.max))])
    cast = size.astype(dtype).astype(np.float64)
    assert found.underflow == np.sum(cast == 0)
    assert found.subnormal == np.sum((cast > 0) & (cast < float(finfo.tiny)))
    assert found.overflow == np.sum(np.abs(values) >= float(finfo.max))


def test_the_ends_of_float32():
    tiny, largest = np.float32(2.0**-149), np.finfo(np.float32).max
    m = measure(np.array([tiny, largest, 2.0**-127], np.float32))
    assert m.histogram == {-149: 1, -127: 1, 127: 1}
    assert (m.smallest, m.largest) == (2.0**-149, float(largest))
    assert m.fits["float32"] == Fit(underflow=0, subnormal=2, overflow=1)
    assert m.fits["float16"] == Fit(underflow=2, subnormal=0, overflow=1)


def test_nothing_and_nan():
    empty = measure(np.zeros((0, 3), np.float32))
    assert empty.size == 0 and empty.log2_rms == -math.inf and not empty.histogram
    m = measure(np.array([np.nan, np.inf, -np.inf, 3.0], np.float32))
    assert (m.nans, m.infs, m.largest, m.log2_rms) == (1, 2, 3.0, math.log2(3))
    assert m.fits["float16"].overflow == 2
    assert measure(np.float32(4.0)).log2_rms == 2
    assert measure(np.complex64(3 + 4j)).size == 2


def test_masks_are_no_overflow():
    values = np.array([1.0, 2.0, np.finfo(np.float32).min, -2e30], np.float32)
    m = measure(values)
    assert (m.masks, m.infs, m.largest) == (2, 0, 2.0) and m.fits["float16"].overflow == 0
    both = measure(np.array([1.0, -3.4e38, 3.4e38], np.float32))
    assert both.masks == 0 and both.fits["float16"].overflow == 2


def test_measures_add_up():
    whole, parts = measure(X), sum((measure(row) for row in X), Measure())
    assert parts.histogram == whole.histogram and parts.fits == whole.fits
    assert parts.size == whole.size and math.isclose(parts.log2_rms, whole.log2_rms)


# What is reported


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_rows_of_a_plain_step(wrap):
    seen = report(wrap(update), formats=FORMATS)(W, X)
    inputs = seen.filter(phase="input")
    assert [row.name for row in inputs] == ["args[0]", "args[1]"]
    (dot,) = seen.filter("layer", phase="forward", primitive="dot_general").rows
    assert dot.shape == (8, 4) and dot.dtype == "float32" and dot.scale is None
    assert "test_report.py" in dot.line and "(loss)" in dot.line
    np.testing.assert_allclose(dot.log2_rms, np.log2(np.sqrt(np.mean((X @ W) ** 2))), rtol=1e-5)
    (backward,) = seen.filter("layer", phase="backward", primitive="dot_general").rows
    assert backward.shape in ((16, 4), (4, 16))
    last = seen.filter(phase="update").rows[-1]
    assert (last.primitive, last.name, last.shape) == ("sub", "args[0]", (16, 4))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("wrap", [jsa.scalify, lambda f: jax.jit(jsa.scalify(f))])
def test_rows_of_a_scalified_step(wrap, dtype):
    fun = wrap(update)
    args = jsa.as_scaled_array((dtype(W), dtype(X)), scale=2.0**-2)
    before = fun(*args)
    seen = report(fun)(*args)
    (dot,) = seen.filter("layer", phase="forward", primitive="dot_general").rows
    assert dot.scale == (-2, -2) and dot.dtype == np.dtype(dtype).name
    plain = np.float64(dtype(X)) @ np.float64(dtype(W))
    rms = np.log2(np.sqrt(np.mean(plain**2)))
    np.testing.assert_allclose(dot.log2_rms + dot.scale[0], rms, atol=0.02)
    (backward,) = seen.filter("layer", phase="backward", primitive="dot_general").rows
    assert backward.scale is not None
    assert seen.filter(phase="update").rows[-1].name == "args[0]"
    after = fun(*args)  # and the function is as it was
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_scalified_step_inside_of_a_function_that_was_jitted_and_called_before():
    step = jax.jit(jsa.scalify(update))
    outer = jax.jit(lambda w, x: step(step(w, x)[0], x))
    args = jsa.as_scaled_array((W, X))
    outer(*args)
    seen = report(outer)(*args)
    (dot,) = seen.filter("layer", phase="forward", primitive="dot_general").rows
    assert dot.runs == 2 and dot.scale is not None


def test_loops_are_one_row():
    def fun(x):
        return lax.scan(lambda c, s: (c * s, c), x, jnp.arange(1.0, 5.0))

    (row,) = report(fun)(X).filter(primitive="mul").rows
    assert row.runs == 4 and row.size == 4 * X.size
    np.testing.assert_allclose(row.measure.largest, 24 * np.abs(X).max(), rtol=1e-6)
    scaled = report(jsa.scalify(fun))(jsa.as_scaled_array(X))
    assert any(r.primitive == "mul" and r.runs == 4 and r.scale for r in scaled)
    (row,) = report(lambda x: lax.while_loop(lambda x: jnp.all(x < 9), lambda x: x * 2, x))(
        np.float32([1.0, 2.0])
    ).filter(primitive="mul")
    assert row.runs == 3
    seen = report(lambda x: lax.cond(x[0, 0] > 99, jnp.sin, jnp.cos, x))(X)
    assert [r.primitive for r in seen.filter(phase="forward")][-1] == "cos"


@pytest.mark.parametrize("reverse", [False, True])
def test_results_of_loops_are_right(reverse):
    """What follows a loop depends on it: the sums of what it stacks."""

    def fun(x):
        carry, ys = lax.scan(lambda c, v: (c + v, c * v), x[0], x, reverse=reverse)
        return jnp.sin(carry), jnp.cos(ys)

    rows = report(fun)(X).rows
    carry, ys = fun(X)
    for row, want in zip(rows[-2:], (carry, ys), strict=True):
        assert row.measure.largest == float(np.abs(want).max())


def test_underflow_in_the_dtype_that_a_value_has():
    x = np.float16([1e-4, 1.0, 0.0, 1e-7])
    (row,) = report(lambda x: x * x)(x).filter(primitive="mul").rows
    assert row.underflow == 2 and row.measure.zeros == 3
    assert row.fit().underflow == 2
    scaled = jsa.ScaledArray(jnp.asarray(x), jnp.float32(2.0**-30))
    (row,) = report(jsa.scalify(lambda x: x * x))(scaled).filter(primitive="mul").rows
    assert row.underflow == 2 and row.scale == (-60, -60)


def conv(x, k, **how):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers, **how)


def conv_grad(x, k):
    return jax.vjp(lambda k: conv(x, k), k)[1](jnp.full_like(x, 2.0**-14))[0]


IMAGES, KERNELS = np.ones((2, 6, 6, 4), np.float16), np.ones((3, 3, 4, 4), np.float16)
LESS = lax.DotAlgorithmPreset.F16_F16_F16


# Parameters that are None must stay so, and those that name a dtype or its precision must not.
@pytest.mark.parametrize(
    "primitive, fun, operands",
    [
        ("conv_general_dilated", conv, (IMAGES, KERNELS)),
        (
            "conv_general_dilated",
            lambda x, k: conv(x, k, precision="highest", preferred_element_type=np.float16),
            (IMAGES, KERNELS),
        ),
        (
            "conv_general_dilated",
            lambda x, k: conv(x, k, feature_group_count=4),
            (IMAGES, KERNELS[:, :, :1]),
        ),
        ("conv_general_dilated", conv_grad, (IMAGES, KERNELS)),
        ("dot_general", lax.dot, (np.ones((8, 4), np.float16), np.ones((4, 4), np.float16))),
        (
            "dot_general",
            lambda x, y: lax.dot(x, y, precision=LESS, preferred_element_type=np.float16),
            (np.ones((8, 4), np.float16), np.ones((4, 4), np.float16)),
        ),
        (
            "ragged_dot_general",
            lambda x, y: lax.ragged_dot(x, y, np.int32([4, 4]), preferred_element_type=np.float16),
            (np.ones((8, 4), np.float16), np.ones((2, 4, 4), np.float16)),
        ),
        ("convert_element_type", lambda x: lax.convert_element_type(x, "float8_e5m2"), (X**0,)),
        ("reduce_prod", lambda x: lax.reduce_prod(x, (0,)), (np.ones((8, 4), np.float16),)),
    ],
)
def test_underflow_of_every_kind_of_equation(primitive, fun, operands):
    operands = [np.asarray(x * 2.0**-20, x.dtype) for x in operands]
    row = report(fun)(*operands).filter(primitive=primitive).rows[-1]
    assert row.underflow == row.measure.zeros == row.size


def test_callbacks_are_not_run_in_another_dtype():
    seen = []

    def square(x):
        seen.append(x.dtype)
        return np.asarray(x * x)

    x = np.full(3, 2.0**-20, np.float16)
    same = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (_, row) = report(lambda x: jax.pure_callback(square, same, x))(x).rows
    assert seen == [np.float16] and row.measure.zeros == 3 and row.underflow == 0


def test_names_of_the_state():
    state = {"w": W, "momentum": [np.zeros_like(W)]}

    def step(state, x):
        grads = jax.grad(loss)(state["w"], x)
        momentum = 0.9 * state["momentum"][0] + grads
        return {"w": state["w"] - momentum, "momentum": [momentum]}

    seen = report(step)(state, X)
    names = {row.name for row in seen.filter(phase="update")}
    assert {"args[0]['w']", "args[0]['momentum'][0]"} <= names
    assert {row.name for row in seen.filter("args[0]['m*']*")} == {"args[0]['momentum'][0]"}


def test_the_first_nan_of_a_loop_comes_first():
    """It is made by the second equation of the body. The first one has it in the next iteration."""

    def body(h, x):
        h = jnp.sin(h * 2)
        return jnp.log(x) * h, None

    x = jnp.array([[1.0], [-1.0], [1.0]])
    seen = report(lambda h: lax.scan(body, h, x)[0])(jnp.ones(1))
    found = [row.primitive for row in seen.rows if row.nonfinite]
    assert found == ["mul", "sin", "log", "mul"]
    assert [row.primitive for row in seen.sort("size").sort().rows[:4]] == [
        *["log", "mul", "mul", "sin"]
    ]
    assert [row.nonfinite_at for row in seen.sort().rows[:2]] == [8, 9]


@pytest.mark.parametrize("scale", [-2.0, math.nan, math.inf, -0.0, 3.0])
def test_a_scale_that_is_no_power_of_two_is_refused_by_the_name_of_its_leaf(scale):
    bad = jsa.ScaledArray(jnp.zeros(3, jnp.float16), jnp.float32(scale))
    twice = jsa.scalify(lambda state: state["w"] * 2)
    for fun in (twice, jax.jit(twice)):
        with pytest.raises(ValueError, match=r"`args\[0\]\['w'\].scale` must be a power of two"):
            report(fun)({"w": bad})
    with pytest.raises(ValueError, match=r"`kwargs\['state'\]\['w'\].scale` must be a power"):
        report(twice)(state={"w": bad})
    with pytest.raises(ValueError, match=r"`args\[0\]\['w'\].scale` must be a power of two"):
        twice({"w": bad})


def test_filter_sort_and_group():
    seen = report(update, formats=FORMATS)(W * 1e-6, X)
    assert len(seen.filter(dtype="float16")) == 0 and len(seen.filter(dtype=jnp.float32)) == len(
        seen
    )
    assert len(seen.filter(where=lambda row: row.size == 64)) < len(seen)
    assert [r.name for r in seen.filter("lay*", phase="forward")]
    sizes = [row.size for row in seen.sort("size", reverse=True)]
    assert sizes == sorted(sizes, reverse=True)
    worst = seen.sort().rows
    assert worst[0].badness(seen.formats) >= worst[1].badness(seen.formats) > 0
    groups = seen.group(1)
    assert sum(map(len, groups.values())) == len(seen) and "layer" in groups
    with pytest.raises(ValueError, match="`phase` must be one of input, forward"):
        seen.filter(phase="forwards")


def test_underflowing_tensors_are_named():
    small = report(update, formats=FORMATS)(W * 2.0**-18, X)
    named = small.underflowing("float8_e5m2")
    assert len(named) and named.rows[0].shares("float8_e5m2")[0] > 0.5
    args = jsa.as_scaled_array((W * np.float32(2.0**-18), X), "rms")
    scaled = report(jsa.scalify(update), formats=FORMATS)(*args)
    assert not len(scaled.filter(phase="backward").underflowing("float16"))


def test_printed():
    text = str(report(update, formats=FORMATS)(W, X))
    assert "in float16" in text and "layer" in text and "test_report.py:" in text
    assert "values, 0 scaled" in text.splitlines()[-1]
    assert "0 values" in str(report(lambda x: x)(np.arange(3)))


def test_json_and_dataframe(tmp_path):
    seen = report(update, formats=FORMATS)(W, X)
    text = seen.to_json(tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found == json.loads(text) and len(found["rows"]) == len(seen)
    assert found["rows"][0]["fits"]["float16"] == {"underflow": 0, "subnormal": 0, "overflow": 0}
    zero = report(lambda x: x * 0)(X).to_json()
    assert "Infinity" not in zero and "NaN" not in zero
    pandas = pytest.importorskip("pandas")
    frame = seen.to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == len(seen)
    assert {"name", "underflow_float16", "log2_rms", "scale_low"} <= set(frame.columns)


def test_bad_input():
    with pytest.raises(TypeError, match="`fun` must be callable, got int"):
        report(3)
    with pytest.raises(TypeError, match="`formats` must name real floating dtypes, got 'int8'"):
        report(update, formats=["int8"])
    with pytest.raises(TypeError, match="got 'float17'"):
        report(update, formats=["float17"])
    (row, *_) = report(update)(W, X)
    with pytest.raises(ValueError, match="be in `formats`, got float8_e4m3b11fnuz"):
        row.fit("float8_e4m3b11fnuz")
    asked = report(update, formats=["float8_e4m3b11fnuz"])(W, X)
    assert asked.rows[0].fit("float8_e4m3b11fnuz").overflow == 0


# What is suggested


def test_suggestions_for_a_plain_step():
    seen = report(update, formats=["float16"])(W * 2.0**-22, X)
    first = suggest(seen)[0]
    assert "in float16" in first and "scalify" in first and "become zero" in " ".join(suggest(seen))
    assert len(suggest(seen, limit=1)) == 2 and "more places" in suggest(seen, limit=1)[1]


def test_suggestions_for_scales_that_are_off():
    off = jsa.ScaledArray(jnp.float16(W * 2.0**-16), jnp.float32(1.0))
    (first, *_) = suggest(report(jsa.scalify(lambda w: w * 2))(off))
    assert "should be 2^-16" in first and "dynamic_rescale" in first and "args[0]" in first


@pytest.mark.parametrize("scalify", [jsa.scalify, lambda f: f])
@pytest.mark.parametrize("name", ["silu", "gelu", "glu", "mish"])
def test_a_row_inside_jax_nn_has_the_line_of_the_call(name, scalify):
    """JAX traces `silu` and `glu` under their own `jit`, with no line of the user's."""

    def fun(x):
        y = x * 2
        y = getattr(jax.nn, name)(y)
        return jnp.sum(y * y)

    call = fun.__code__.co_firstlineno + 2
    x = jsa.as_scaled_array(jnp.float16(X)) if scalify is jsa.scalify else X
    rows = report(scalify(jax.grad(fun)))(x).rows
    assert all(row.line for row in rows if row.phase != "input")
    inside = [row for row in rows if row.function]
    assert {row.phase for row in inside} == {"forward", "backward"}
    assert all(f"test_report.py:{call} " in row.line for row in inside)
    assert name in {row.function for row in inside}
    others = [row for row in rows if not row.function and row.phase != "input"]
    assert others and all(f"test_report.py:{call} " not in row.line for row in others)
    assert report(fun)(X).rows[-1].as_dict()["function"] == ""


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("silu", "or use jsa.nn.silu for jax.nn.silu"),
        ("hard_tanh", "or give a function that calls jax.nn.hard_tanh a rule (jsa.custom_scale)"),
    ],
)
def test_nothing_inside_jax_nn_is_to_be_edited(name, instead):
    w = jsa.as_scaled_array(W * 1e-4, dtype="float16")
    x = jnp.float16(X * 1e-2)
    step = jsa.scalify(jax.grad(lambda w: jnp.sum(getattr(jax.nn, name)(x @ w))))
    found = suggest(report(step)(w))
    inside = [s for s in found if f"inside jax.nn.{name} at test_report.py:" in s]
    forward = [s for s in inside if s.startswith("forward pass")]
    assert forward and all("jsa.ops.dynamic_rescale_l2 on its argument" in s for s in forward)
    assert all(instead in s and "rebalance_scale" not in s for s in forward)
    backward = [s for s in inside if s.startswith("backward pass")]
    assert all("jsa.ops.dynamic_rescale_l2_grad on its result" in s for s in backward)
    assert any("dot_general at test_report.py" in s and "rebalance_scale" in s for s in found)


def test_a_cause_is_said_once():
    """Of a plain step whose values all want a scale the worst is described, the others named."""
    small = W * np.float32(2.0**-40)

    def fun(w):
        for i in range(8):
            with jax.named_scope(f"layer_{i}"):
                w = jnp.tanh(w) * 0.5
        return w

    found = suggest(report(fun, formats=["float16"])(small))
    assert len(found) <= 3
    (scales,) = (s for s in found if "It needs a scale of 2^" in s)
    assert scales.count("jsa.scalify gives it one") == 1
    rest = scales.partition("The same at ")[2]
    assert rest.count("(2^-") == 6 and rest.endswith("; and 2 more.")

    def logarithm(x):
        x = jnp.log(x)
        return jnp.exp(x)

    bad = suggest(report(logarithm)(np.float32([-1.0, 1.0])))
    assert len([s for s in bad if "find_nonfinite" in s]) == 1 and "The same at" in bad[0]


def test_suggestions_leave_out_what_an_optimizer_computes_wider():
    optax = pytest.importorskip("optax")
    optimizer = jsa.optim.low_precision(optax.adam(1e-3))
    w = jsa.as_scaled_array(jnp.full((4, 4), 0.1), "rms", dtype=jnp.float16)
    state = jsa.as_scaled_array(optimizer.init(w))

    def step(w, state, x):
        grads = jax.grad(lambda w: jnp.mean(jnp.square(x @ w)))(w)
        updates, state = optimizer.update(grads, state, w)
        return jsa.optim.apply_updates(w, updates), state

    x = jnp.ones((2, 4), jnp.float16)
    seen = report(jsa.scalify(step), formats=["float16"])(w, state, x)
    lossy = [row for row in seen if max(row.shares("float16")) > 0.1]
    assert {(row.phase, row.dtype) for row in lossy} == {("update", "float32")}
    assert suggest(seen) == ["Nothing is lost in float16: no value needs care."]


def test_suggestions_where_no_scale_helps():
    wide = np.float32(2.0 ** RNG.integers(-40, 40, 1000))
    wide /= np.sqrt(np.mean(np.float64(wide) ** 2)).astype(np.float32)
    assert "no scale helps" in suggest(report(lambda x: x)(wide), "float16")[0]


def test_suggestions_where_nothing_is_left():
    x = np.full(8, 2.0**-15, np.float16)
    (plain,) = (s for s in suggest(report(lambda x: x * x)(x)) if "mul" in s)
    assert "100% of the elements become zero. Nothing is left of it: jsa.scalify" in plain
    scaled = jsa.ScaledArray(jnp.asarray(x), jnp.float32(4.0))
    (found,) = (s for s in suggest(report(jsa.scalify(lambda x: x * x))(scaled)) if "mul" in s)
    assert "become zero. Nothing is left" in found and "rescale what it is made of" in found


def test_suggestions_for_nan_and_for_nothing():
    (first, *_) = suggest(report(jnp.log)(np.float32([-1.0, 1.0])))
    assert "find_nonfinite" in first
    (only,) = suggest(report(update)(W, X))
    assert only.startswith("Nothing is lost")
    with pytest.raises(ValueError, match="be in `formats`"):
        suggest(report(update)(W, X), "float8_e4m3b11fnuz")
    with pytest.raises(TypeError, match="`report` must be a `Report`, got int"):
        suggest(3)
