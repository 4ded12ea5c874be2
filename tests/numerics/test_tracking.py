"""`jsa.numerics.track`: records of a training step against `measure` of the same values."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.conversions.nnx_objects import pure_call
from jax_scalify.numerics.device_statistics import absent, combine, finish, observe
from jax_scalify.numerics.host_statistics import measure

STATISTICS = ["scale_exponent", "log2_rms", "zeros", "underflow", "overflow", "nonfinite"]
DTYPES = [
    np.dtype(d)
    for d in (
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    )
]


def observed(data, scale=None, dtype=None):
    """What a record says of one array."""
    rows = jax.jit(functools.partial(observe, dtype=dtype))(jnp.asarray(data), scale)[None]
    return {name: float(x[0]) for name, x in jax.jit(finish)(rows).items()}


def expected(data, dtype=None):
    """The same of `measure`, in float64 on the host."""
    data = np.asarray(data)
    own = np.dtype(dtype or data.dtype)
    m = measure(data, [own])
    fit, size = m.fits[own.name], max(m.size, 1)
    return {
        "log2_rms": m.log2_rms,
        "zeros": (m.zeros + fit.underflow) / size,
        "underflow": (fit.underflow + fit.subnormal) / size,
        "overflow": fit.overflow / size,
        "nonfinite": (m.nans + m.infs) / size,
    }


def check(data, dtype=None):
    found, want = observed(data, dtype=dtype), expected(data, dtype)
    rms, want_rms = found.pop("log2_rms"), want.pop("log2_rms")
    assert rms == pytest.approx(want_rms, abs=1e-5)
    assert math.isnan(found.pop("scale_exponent"))
    assert found == pytest.approx(want, abs=1e-7)


def values(dtype):
    """Numbers of a dtype: its whole range, its ends, zeros, nan, infinities."""
    finfo = jnp.finfo(dtype)
    low, high = int(np.log2(float(finfo.smallest_subnormal))), finfo.maxexp
    rng = np.random.default_rng(0)
    numbers = rng.choice([-1, 1], 500) * np.exp2(rng.uniform(low, high - 1, 500))
    tiny, step = float(finfo.tiny), float(finfo.smallest_subnormal)
    ends = [0.0, -0.0, tiny, tiny - step, -step, float(finfo.max), -float(finfo.max)]
    return np.array([*numbers, *ends]).astype(dtype)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("power", [-140, -60, -20, 0, 20, 60, 110])
def test_statistics_are_those_of_measure(dtype, power):
    data = np.random.default_rng(power + 200).normal(size=(40, 30)).astype(np.float32)
    with np.errstate(all="ignore"):
        check((data.astype(np.float64) * 2.0**power).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_over_the_whole_range(dtype):
    check(values(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_statistics_in_another_dtype(dtype, other):
    check(values(dtype), other)


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((3, 4), np.float32),
        np.zeros((0, 4), np.float16),
        np.float32(3.0),
        np.float32([1.0, np.nan, np.inf, -np.inf, 0.0]),
        np.float16([1.0, np.nan, np.inf, -np.inf, 0.0, 2.0**-24]),
        np.array([np.nan, 448.0, 2.0**-9], ml_dtypes.float8_e4m3fn),
        np.float32([1e-45, 0.0, -1e-42]),
        np.array([1e-40, -1e-39], ml_dtypes.bfloat16),
        np.float32([1.0, 2.0, np.finfo(np.float32).min]),  # a mask
        np.float16([1.0, -65504.0, -65504.0]),
        np.float16([65504.0, -65504.0, -65504.0]),  # saturated
        np.float32([3e38, 3e38]),
        np.complex64([1 + 2j, 1e-20j]),
    ],
    ids=repr,
)
def test_statistics_of_special_arrays(data):
    check(data)


@pytest.mark.parametrize("power", [-126, -40, -1, 0, 1, 40, 126])
def test_scale_exponent_is_exact(power):
    assert observed(np.float32([1.0]), np.float32(2.0**power))["scale_exponent"] == power
    scales = np.float32([[2.0**power], [2.0**-126]])
    assert observed(np.ones((2, 3), np.float16), scales)["scale_exponent"] == power


def test_scale_zero_is_no_exponent():
    assert observed(np.float32([0.0]), np.float32(0))["scale_exponent"] == -math.inf


def test_combining_is_measuring_together():
    rng = np.random.default_rng(1)
    parts = rng.normal(size=(5, 100)) * 2.0 ** np.array([[-20], [-10], [0], [5], [15]])
    parts = parts.clip(-65504, 65504).astype(np.float16)
    rows = jnp.stack([observe(p, np.float32(2.0**i)) for i, p in enumerate(parts)])
    rows = jnp.concatenate([absent()[None], rows])
    found = {k: float(v[0]) for k, v in finish(combine(rows)[None]).items()}
    assert found.pop("scale_exponent") == 4
    assert found == pytest.approx(expected(parts), abs=1e-5)
    nothing = finish(combine(absent()[None])[None])
    assert all(math.isnan(float(v[0])) for v in nothing.values())


# The step.


def loss(params, x):
    with jax.named_scope("layer"):
        hidden = jnp.tanh(x @ params["w"])
    with jax.named_scope("head"):
        return jnp.mean((hidden @ params["v"]) ** 2)


def update(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture
def args():
    rng = np.random.default_rng(0)
    params = {
        "w": np.float32(rng.normal(size=(8, 8))),
        "v": np.float32(2.0**-10 * rng.normal(size=(8, 1))),
    }
    return params, np.float32(rng.normal(size=(16, 8)))


@pytest.fixture
def scaled(args):
    return jsa.as_scaled_array(args, scale="rms")


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-6, atol=1e-9)


def test_a_record_each_n_calls(args):
    params, x = args
    tracked, step = jsa.numerics.track(jax.jit(update), every=3), jax.jit(update)
    plain = params
    for number in range(1, 8):
        before = params
        (params, value), record = tracked(params, x)
        plain, plain_value = step(plain, x)
        same((params, value), (plain, plain_value))
        assert (record is None) == (number % 3 != 0)
        if record is not None:
            assert record.names == ("args[0]['v']", "args[0]['w']", "args[1]")
            want = expected(before["w"])
            rms = record.log2_rms[record.names.index("args[0]['w']")]
            assert float(rms) == pytest.approx(want["log2_rms"], abs=1e-5)


def test_other_calls_are_the_very_function(args):
    calls = []

    def step(*args):
        calls.append(jax.tree.leaves(args)[0])
        return update(*args)

    tracked = jsa.numerics.track(step, every=100)
    tracked(*args)
    before = len(calls)
    tracked(*args)
    assert len(calls) == before + 1
    assert calls[-1] is args[0]["v"]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("select", [None, ["backward/*", "args[0]"], lambda name: True])
@pytest.mark.parametrize("is_jitted", [True, False])
def test_a_scalified_step(scaled, select, is_jitted):
    step = jsa.scalify(update)
    step = jax.jit(step) if is_jitted else step
    out, record = jsa.numerics.track(step, select, every=1)(*scaled)
    same(out, jax.jit(step)(*scaled))
    tensors = record.as_dict(1)["tensors"]
    v = tensors["args[0]['v']"]
    assert v["scale_exponent"] == np.log2(float(scaled[0]["v"].scale)) < -5
    if select is not None:
        gradient = tensors["backward/layer:dot_general"]
        assert gradient["scale_exponent"] < -5 and abs(gradient["log2_rms"]) < 5


def test_values_are_those_of_the_report(scaled):
    step = jax.jit(jsa.scalify(update))
    _, record = jsa.numerics.track(step, lambda name: True, every=1)(*scaled)
    tensors = list(record.as_dict(0)["tensors"].values())
    rows = jsa.numerics.report(step)(*scaled).rows
    assert len(rows) == len(tensors) > 10
    for row, found in zip(rows, tensors, strict=True):
        exponent = found["scale_exponent"]
        want = None if row.scale is None else row.scale[1]
        assert exponent == want or (exponent is None and want == 0)  # all scales 0
        if math.isfinite(row.log2_rms):
            assert found["log2_rms"] == pytest.approx(row.log2_rms, abs=1e-3)
        else:
            assert found["log2_rms"] is None


def layers(ws, x):
    @jax.checkpoint
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w) * 2, None

    def deep(ws):
        x_out, _ = jax.lax.scan(layer, x, ws)
        return jnp.sum(x_out**2)

    value, grads = jax.value_and_grad(deep)(ws)
    return ws - 0.1 * grads, value


@pytest.mark.sampled(16)
@pytest.mark.optimized
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_scan_has_one_entry_for_all_steps(is_scaled):
    rng = np.random.default_rng(2)
    args = (np.float32(rng.normal(size=(3, 4, 4))), np.float32(rng.normal(size=(5, 4))))
    step = layers
    if is_scaled:
        args, step = jsa.as_scaled_array(args), jsa.scalify(layers)
    tracked = jsa.numerics.track(jax.jit(step), lambda name: "layer" in name, every=1)
    out, record = tracked(*args)
    same(out, jax.jit(step)(*args))
    rows = jsa.numerics.report(jax.jit(step))(*args).filter("layer").rows
    tensors = list(record.as_dict(0)["tensors"].values())
    assert len(rows) == len(tensors) and any(row.runs == 3 for row in rows)
    for row, found in zip(rows, tensors, strict=True):
        assert found["log2_rms"] == pytest.approx(row.log2_rms, abs=1e-3)
        assert found["scale_exponent"] == (row.scale[1] if is_scaled else None)


def test_rematerialisation_stays():
    args = (np.ones((3, 4, 4), np.float32), np.ones((5, 4), np.float32))
    tracked = jsa.numerics.track(jax.jit(layers), lambda name: "layer" in name, every=1)
    program, arrays = tracked._program(pure_call(jax.jit(layers), args, {}))
    text = program.lower(*arrays).as_text()
    assert text.count("optimization_barrier") == jax.jit(layers).lower(*args).as_text().count(
        "optimization_barrier"
    )
    assert "optimization_barrier" in text


def test_branches(args):
    def step(flag, x):
        return jax.lax.cond(flag, lambda x: jnp.sin(x), lambda x: 2 * jnp.cos(x), x)

    tracked = jsa.numerics.track(step, ["sin", "cos"], every=1)
    for flag in (True, False):
        out, record = tracked(np.array(flag), args[1])
        same(out, step(flag, args[1]))
        tensors = record.as_dict(0)["tensors"]
        taken, other = ("sin", "cos") if flag else ("cos", "sin")
        assert set(tensors[other].values()) == {None}
        want = np.log2(np.sqrt(np.mean(getattr(np, taken)(args[1]) ** 2)))
        assert tensors[taken]["log2_rms"] == pytest.approx(want, abs=1e-5)


def test_platform_dependent_code_and_while_loops():
    def step(x):
        x = jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)
        x = jax.lax.while_loop(lambda x: jnp.sum(x) < 10, lambda x: x * 2 + 1, x)
        return jnp.exp(x)

    x = np.ones(3, np.float32)
    tracked = jsa.numerics.track(step, lambda name: True, every=1)
    out, record = tracked(x)
    same(out, jax.jit(step)(x))
    assert "sin" in record.names and "exp" in record.names
    assert not any("mul" in name for name in record.names)


def test_custom_functions_are_looked_into():
    @jax.custom_jvp
    def clipped(x):
        return jnp.minimum(x, 1) * 3

    clipped.defjvp(lambda p, t: (clipped(*p), t[0]))
    x = np.float32([0.5, 2.0])
    step = lambda x: jax.nn.relu(clipped(x))  # noqa: E731
    out, record = jsa.numerics.track(step, ["mul", "min"], every=1)(x)
    same(out, step(x))
    assert record.names == ("min", "mul")
    np.testing.assert_allclose(record.log2_rms[1], np.log2(np.sqrt((1.5**2 + 9) / 2)), rtol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("select", [None, "backward"])
def test_what_the_step_donates_is_donated(args, select):
    state = jax.tree.map(jnp.asarray, args[0])
    tracked = jsa.numerics.track(jax.jit(update, donate_argnums=0), select, every=2)
    x = jnp.asarray(args[1])
    for _ in range(4):
        before = state
        (state, _), _ = tracked(state, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        assert not x.is_deleted()


def test_shardings_of_a_jitted_step_stay(args):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    step = jax.jit(lambda x: jnp.sin(x) * 2, out_shardings=sharding)
    out, _ = jsa.numerics.track(step, "sin", every=1)(args[1])
    assert out.sharding.is_equivalent_to(sharding, out.ndim)


def test_frozen_scales_compile_again_and_count_on(scaled):
    step = jax.jit(jsa.scalify(lambda params, x: jsa.match_scales(update(params, x)[0], params)))
    tracked = jsa.numerics.track(step, "args[0]", every=2)
    params, x = scaled
    records = []
    for number in range(1, 5):
        params, record = tracked(params, x)
        records.append(record)
        if number == 2:
            params = jsa.freeze_scales(params)
    assert [r is not None for r in records] == [False, True, False, True]
    np.testing.assert_array_equal(records[1].scale_exponent, records[3].scale_exponent)


def test_record_and_names(args):
    tracked = jsa.numerics.track(jax.jit(update), every=10)
    out, record = tracked.record(*args)
    same(out, update(*args))
    names = tracked.names(*args)
    assert set(record.names) <= set(names) and len(set(names)) == len(names)
    assert {"layer:dot_general", "backward/layer:dot_general"} <= set(names)
    as_dict = record.as_dict(7)
    assert json.loads(json.dumps(as_dict, allow_nan=False)) == as_dict
    assert as_dict["step"] == 7
    assert list(as_dict["tensors"]["args[1]"]) == STATISTICS
    leaves, tree = jax.tree.flatten(record)
    assert len(leaves) == 6 and all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert jax.tree.unflatten(tree, leaves).names == record.names


def test_keywords_and_static_leaves(args):
    def step(params, *, x, mode, again=None):
        assert mode == "fast" and again is None
        return update(params, x)

    tracked = jsa.numerics.track(step, ["kwargs['x']", "args*w']"], every=1)
    out, record = tracked(args[0], x=args[1], mode="fast")
    same(out, update(*args))
    assert record.names == ("args[0]['w']", "kwargs['x']")


def test_a_dtype_to_ask_about(args):
    params = {"w": args[0]["w"] * 2.0**-22, "v": args[0]["v"] * 2.0**40}
    tracked = jsa.numerics.track(jax.jit(update), every=1, dtype="float16")
    _, record = tracked(params, args[1])
    tensors = record.as_dict(0)["tensors"]
    assert tensors["args[0]['v']"]["overflow"] == 1
    want = expected(params["w"], "float16")
    for name in ("zeros", "underflow"):
        assert tensors["args[0]['w']"][name] == pytest.approx(want[name])


def test_it_is_compiled_once(args):
    traces = []

    @jax.jit
    def step(params, x):
        traces.append(None)
        return update(params, x)

    tracked = jsa.numerics.track(step, every=2)
    params, x = args
    for _ in range(6):
        (params, _), _ = tracked(params, x)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "`every` must be at least 1, got 0"),
        ({"every": 1.5}, TypeError, "`every` must be an int, got 1.5"),
        ({"every": "a"}, TypeError, "`every` must be an int, got 'a'"),
        ({"select": 3}, TypeError, "`select` must be"),
        ({"select": []}, TypeError, "`select` must be"),
        ({"dtype": "int8"}, TypeError, "real floating dtypes"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        jsa.numerics.track(update, **options)


def test_bad_updates(args):
    with pytest.raises(TypeError, match="`update` must be callable, got int"):
        jsa.numerics.track(3)
    with pytest.raises(ValueError, match=r"'layr'.*'layer:tanh'.*tracked.names"):
        jsa.numerics.track(update, "layr")(*args)  # at the first call already
    with pytest.raises(ValueError, match="`select` is False for all of"):
        jsa.numerics.track(update, lambda name: False)(*args)
    with pytest.raises(ValueError, match="no floating argument"):
        jsa.numerics.track(lambda x: x * 2)(np.int32([1]))
    with pytest.raises(ValueError, match="outside of `jax.jit`"):
        jax.jit(jsa.numerics.track(update))(*args)
