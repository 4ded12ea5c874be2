"""Matmuls of block formats against float64, in both passes and in every way they are reached."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify.blocks.formats import NAMES
from tests import block_values as reference

FORMS = [jsa.BlockFormat(name) for name in NAMES]


def both(form):
    return dict(forward_dtype=form, backward_dtype=form)


def results_of(fun, *args):
    """The result, and the gradients for a cotangent."""
    out, pull = jax.vjp(fun, *args)
    return out, *pull(reference.normal(*out.shape, seed=9, dtype=out.dtype))


def in_one_program(*calls):
    """The results of calls, `(fun, *args)`, compiled together."""
    funs, args = [call[0] for call in calls], [call[1:] for call in calls]
    return jax.jit(lambda args: [f(*own) for f, own in zip(funs, args, strict=True)])(args)


def of_matmul(*args, **formats):
    """A call of `results_of` for `jsa.nn.matmul`."""
    return functools.partial(results_of, functools.partial(jsa.nn.matmul, **formats)), *args


def test_three_matmuls_quantise_along_their_own_contracted_dims():
    x, w = reference.normal(20, 70), reference.normal(70, 40, seed=1)
    ct = reference.normal(20, 40, seed=9)
    forms = FORMS[:1] + FORMS[2:]
    results = in_one_program(*(of_matmul(x, w, **both(form)) for form in forms))
    for form, got in zip(forms, results, strict=True):
        want = (
            reference.matmul(x, w, (form, form)),
            reference.matmul(ct, w.T, (form, form)),
            reference.matmul(x.T, ct, (form, form)),
        )
        for g, r in zip(got, want, strict=True):
            assert reference.error(g, r) < 2e-6, form


def test_every_way_to_give_formats_is_the_same():
    """Beside those that are `jsa.nn.matmul` or `DotGeneral` in other words."""
    form = FORMS[3]
    x, w = reference.normal(6, 48, dtype=jnp.bfloat16), reference.normal(48, 16, dtype=jnp.bfloat16)
    formats, dims = both("nvfp4"), (((1,), (0,)), ((), ()))
    ways = [
        functools.partial(jsa.nn.matmul, **both(form)),
        functools.partial(jsa.nn.dot_general, dimension_numbers=dims, **formats),
        jsa.fp8_matmuls(lambda x, w: x @ w, **formats),
        lambda x, w: jsa.nn.ragged_dot(x, w[None], jnp.array([6]), **formats),
    ]
    results = in_one_program(*((functools.partial(results_of, way), x, w) for way in ways))
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(first, second)


def test_inside_scalify_the_scale_stays_outside_and_the_values_are_the_same():
    """Of values at any scale: NVFP4, too, which chooses no scale for the whole then."""
    x, w = reference.normal(8, 64, dtype=jnp.bfloat16), reference.normal(64, 16, dtype=jnp.bfloat16)
    scales, forms = (2.0**-60, 2.0**40), FORMS[3:]
    products = [functools.partial(jsa.nn.matmul, **both(form)) for form in forms]

    def plain(x, w):
        return [results_of(lambda x, w, p=p: jnp.tanh(p(x, w)), x, w) for p in products]

    def moved(x, w):
        return [results_of(lambda x, w, p=p: jnp.tanh(p(x, w) * 2.0**20), x, w) for p in products]

    args = [jsa.scaled_array(a, jnp.float32(s)) for a, s in zip((x, w), scales, strict=True)]
    wants, results = jax.jit(plain)(x, w), jax.jit(jsa.scalify(moved))(*args)
    for got, want in zip(results, wants, strict=True):
        got = jsa.asarray(got, jnp.float32)
        for g, r, factor in zip(got, want, (1.0, *scales), strict=True):
            assert reference.error(g * factor, np.float32(r)) < 1e-2


def test_dims_of_all_kinds(request):
    """Batch dims, several contracted and free ones, blocks that do not fit into the last."""
    full = request.config.getoption("--full")
    specs = [
        ("bti,io->bto", (2, 33, 8), (8, 9)),  # the weight's gradient contracts 66
        ("bthd,hdo->bto", (2, 3, 2, 20), (2, 20, 7)),  # 40 in a row
        ("bij,bjk->bik", (2, 5, 40), (2, 40, 6)),
        *([("i,io->o", (40,), (40, 3)), ("ij,jk->ik", (2, 0), (0, 3))] if full else []),
        ("i,j->ij", (4,), (3,)),
        ("ij,jk->ik", (0, 8), (8, 3)),
    ]
    form, calls = FORMS[0], []
    for spec, *shapes in specs:
        args = [reference.normal(*shape, seed=i) for i, shape in enumerate(shapes)]
        for einsum in (functools.partial(jsa.nn.einsum, **both(form)), jnp.einsum):
            calls.append((functools.partial(results_of, functools.partial(einsum, spec)), *args))
    results = in_one_program(*calls)
    for (spec, *_), got, want in zip(specs, results[::2], results[1::2], strict=True):
        for g, r in zip(got, want, strict=True):
            assert reference.error(g, r) < 0.1, spec
    lhs, rhs = (np.reshape(x, s) for x, s in zip(calls[2][1:], ((6, 40), (40, 7)), strict=True))
    want = reference.matmul(lhs, rhs, (form, form))
    assert reference.error(results[2][0].reshape(6, 7), want) < 2e-6


def test_of_groups():
    """Rows behind the last group are nobody's: not even their nan is seen."""
    form = FORMS[2]
    x = reference.normal(70, 40).at[60:].set(jnp.nan)
    w, sizes = reference.normal(2, 40, 8, seed=1), jnp.array([37, 23])
    fun = functools.partial(jsa.nn.ragged_dot, group_sizes=sizes, **both(form))

    def of_groups(x, w):
        out, pull = jax.vjp(lambda x, w: fun(x, w), x, w)
        return out, *pull(reference.normal(70, 8, seed=9))

    out, _, gradient = jax.jit(of_groups)(x, w)
    rows = np.split(reference.rounded(x[:60], form, 1), [37])
    want = [r @ reference.rounded(w[i], form, 0) for i, r in enumerate(rows)]
    assert reference.error(out[:60], np.concatenate(want)) < 2e-6
    ct = np.where(np.arange(70)[:, None] < 60, reference.normal(70, 8, seed=9), 0)
    rows, cts = (np.split(reference.rounded(np.nan_to_num(a), form, 0)[:60], [37]) for a in (x, ct))
    want = np.stack([r.T @ c for r, c in zip(rows, cts, strict=True)])
    assert reference.error(gradient, want) < 2e-6


def test_block_formats_beside_dtypes():
    """A cotangent in a dtype meets the numbers that the forward pass has multiplied."""
    x, w = reference.normal(20, 70), reference.normal(70, 40, seed=1)
    ct = np.float64(reference.normal(20, 40, seed=9))
    form = FORMS[0]
    first, second = in_one_program(
        of_matmul(x, w, forward_dtype=("mxfp8", jnp.bfloat16), backward_dtype=jnp.float32),
        of_matmul(x, w, forward_dtype=jnp.bfloat16, backward_dtype="mxfp8"),
    )
    lhs, rhs = reference.rounded(x, form, 1), np.float64(w.astype(jnp.bfloat16))
    for g, r in zip(first, (lhs @ rhs, ct @ rhs.T, lhs.T @ ct), strict=True):
        assert reference.error(g, r) < 2e-6
    assert reference.error(second[1], reference.rounded(ct, form, 1) @ rhs.T) < 2e-6


def test_square_blocks_have_the_same_values_in_both_passes():
    form = jsa.BlockFormat("mxfp4", square=True)
    x, w = reference.normal(4, 70), reference.normal(70, 50, seed=1)
    formats = dict(forward_dtype=(jnp.float32, form), backward_dtype=jnp.float32)
    values, transposed, both_passes = in_one_program(
        (functools.partial(jsa.nn.matmul, **formats), jnp.eye(70), w),
        (functools.partial(jsa.nn.matmul, **formats), jnp.eye(50), w.T),
        of_matmul(x, w, forward_dtype=("mxfp4", form), backward_dtype="mxfp4"),
    )
    np.testing.assert_array_equal(values, transposed.T)
    padded = np.pad(np.float64(w), ((0, 26), (0, 14))).reshape(3, 32, 2, 32).swapaxes(1, 2)
    want = np.multiply(*reference.quantised(padded.reshape(6, 1024), form)).reshape(3, 2, 32, 32)
    np.testing.assert_array_equal(values, want.swapaxes(1, 2).reshape(96, 64)[:70, :50])
    lhs = reference.rounded(x, FORMS[2], 1)
    ct = reference.rounded(reference.normal(4, 50, seed=9), FORMS[2], 1)
    for got, want in zip(both_passes, (lhs @ values, ct @ np.float64(transposed))):
        assert reference.error(got, want) < 2e-6


def test_a_hadamard_transform_changes_the_rounding_of_the_weights_gradient_alone():
    x, w = reference.normal(48, 24).at[3].mul(100), reference.normal(24, 20, seed=1)
    kinds = [("nvfp4", 0), ("nvfp4", 64)]
    plain, transformed = in_one_program(
        *(of_matmul(x, w, hadamard=length, **both(name)) for name, length in kinds)
    )
    for i in (0, 1):
        np.testing.assert_array_equal(plain[i], transformed[i])
    want = np.float64(x).T @ np.float64(reference.normal(48, 20, seed=9))
    assert (plain[2] != transformed[2]).any()
    assert reference.error(transformed[2], want) < 0.3


def test_vmap_scan_remat_and_second_derivatives(request):
    x, w = reference.normal(3, 5, 40), reference.normal(40, 40, seed=1) / 6
    stacked = jnp.stack([w, 2 * w, w])
    dot = functools.partial(jsa.nn.matmul, **both("nvfp4"))  # which has a scale of the whole

    def layers(w, x):
        step = jax.checkpoint(lambda h, _: (jnp.tanh(dot(h, w)), None))
        return jnp.sum(jax.lax.scan(step, x, None, 3)[0])

    def unrolled(w, x):
        for _ in range(3):
            x = jnp.tanh(dot(x, w))
        return jnp.sum(x)

    def product(dot):
        slope = jax.grad(lambda w: jnp.sum(jnp.square(dot(x[0], w))))
        return jax.jvp(slope, (w,), (w,))[1]

    calls = [
        (jax.vmap(jax.vmap(dot, (None, 0)), (0, None)), x, stacked),
        (lambda x, w: jnp.stack([jnp.stack([dot(row, m) for m in w]) for row in x]), x, stacked),
        (functools.partial(product, dot),),
        (functools.partial(product, jnp.matmul),),
        (jax.grad(layers), w, x[0]),
        (jax.grad(unrolled), w, x[0]),
        (jax.vmap(dot), x, stacked),
        (lambda x, w: jnp.stack([dot(row, m) for row, m in zip(x, w)]), x, stacked),
    ]
    calls = calls if request.config.getoption("--full") else calls[:4]
    results = in_one_program(*calls)
    for i, (got, want) in enumerate(zip(results[::2], results[1::2], strict=True)):
        assert reference.error(got, want) < 1e-5, calls[2 * i]


def test_nan_and_infinity_are_seen():
    x = jnp.ones((2, 64)).at[0, 3].set(jnp.nan).at[1, 40].set(jnp.inf)
    products = (functools.partial(jsa.nn.matmul, **both(form)) for form in FORMS)
    for out in in_one_program(*((product, x, jnp.ones((64, 2))) for product in products)):
        assert np.isnan(out[0]).all() and not np.isfinite(out[1]).any()


def test_bad_arguments():
    x = jnp.ones((4, 4))
    with pytest.raises(TypeError, match=r"`forward_dtype` must be floating.*'mxfp8'"):
        jsa.nn.matmul(x, x, forward_dtype="mxfp6")
    with pytest.raises(TypeError, match="`backward_dtype` must be floating"):
        jsa.fp8_matmuls(jnp.dot, backward_dtype="fp4")
    with pytest.raises(ValueError, match="`hadamard` must be 0 or a power of two from 2, got 12"):
        jsa.nn.matmul(x, x, hadamard=12, **both("mxfp4"))
    with pytest.raises(ValueError, match="`hadamard` needs block formats"):
        jsa.nn.matmul(x, x, hadamard=16)
    with pytest.raises(TypeError, match="`conv_general_dilated` takes dtypes, got 'mxfp8'"):
        jsa.nn.conv_general_dilated(x[None], x[None], (1,), "SAME", forward_dtype="mxfp8")
