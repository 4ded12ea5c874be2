"""What a matmul of block formats is lowered to: written out, and for a block-scaled kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify._compat import JAX_VERSION
from jax_scalify.blocks import dot
from jax_scalify.blocks.dot import block_dot_p, hadamard_matrix, has_kernel
from jax_scalify.blocks.quantising import Quantiser
from tests import block_values as reference


def params_of(names, dims, hadamard=0, dtype=np.float32, examples=((), ())):
    formats = [jsa.BlockFormat(n) if isinstance(n, str) else n for n in names]
    quantisers = tuple(
        Quantiser(format=f, exponent=Quantiser.of(f).exponent, examples=e)
        for f, e in zip(formats, examples, strict=True)
    )
    types = dict(precision=None, preferred_element_type=np.dtype(dtype), out_sharding=None)
    return dict(dimension_numbers=dims, quantisers=quantisers, hadamard=hadamard, **types)


@pytest.mark.skipif(JAX_VERSION < (0, 12), reason="JAX has `scaled_matmul` for CUDA only")
def test_a_kernel_computes_the_same(request):
    """Batch dims, merged and filled up ones, square blocks, scales of the whole and of examples."""
    square = jsa.BlockFormat("nvfp4", square=True)
    dims = (((1,), (0,)), ((), ()))
    cases = [
        (params_of(("mxfp8", "mxfp8_e5m2"), dims, dtype=jnp.bfloat16), (5, 40), (40, 6)),
        (params_of(("nvfp4", square), dims, hadamard=32), (5, 40), (40, 20)),
        (params_of(("nvfp4", "nvfp4"), (((3,), (1,)), ((1,), (0,)))), (2, 3, 4, 16), (3, 16, 5)),
        (
            params_of(("nvfp4",) * 2, (((2,), (1,)), ((), ())), examples=((0,), (0,))),
            (2, 3, 16),
            (4, 16),
        ),
        (params_of(("mxfp4", "mxfp4"), (((0, 1), (0, 1)), ((), ()))), (3, 20, 4), (3, 20, 5)),
    ]

    cases = cases if request.config.getoption("--full") else cases[1:4]

    def pair(own, lhs, rhs):
        written = dot._written_out(lhs, rhs, dtype=jnp.float32, **own)
        return written, dot._kernel(lhs, rhs, **own)

    operands = [(reference.normal(*lhs), reference.normal(*rhs, seed=1)) for _, lhs, rhs in cases]
    results = jax.jit(lambda x: [pair(c[0], *own) for c, own in zip(cases, x)])(operands)
    for (own, *_), (written, kernel) in zip(cases, results, strict=True):
        assert written.dtype == kernel.dtype == own["preferred_element_type"]
        tolerance = 1e-2 if written.dtype == jnp.bfloat16 else 2e-6
        assert reference.error(kernel, written) < tolerance, own


def test_for_cuda_it_is_a_block_scaled_dot_where_there_is_a_kernel():
    def lowered(formats):
        dot = jax.jit(lambda x, w: jsa.nn.matmul(x, w, forward_dtype=formats))
        shape = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        return dot.trace(shape, shape).lower(lowering_platforms=("cuda",)).as_text()

    assert "block_scaled_dot" in lowered("nvfp4")
    assert "block_scaled_dot" not in lowered("mxfp8_e5m2")


def test_which_formats_have_kernels():
    def found(*names):
        return has_kernel([Quantiser.of(jsa.BlockFormat(name)) for name in names])

    assert found("mxfp8", "mxfp8_e5m2") and found("mxfp4", "mxfp4") and found("nvfp4", "nvfp4")
    assert not found("mxfp8_e5m2", "mxfp8_e5m2") and not found("mxfp8", "mxfp4")
    assert not found("mxfp4", "nvfp4")


def test_a_hadamard_matrix_is_one():
    for length in (2, 16, 64):
        matrix = hadamard_matrix(length)
        np.testing.assert_array_equal(matrix @ matrix.T, length * np.eye(length))
        assert 0 < np.sum(matrix[:, 0] < 0) < length


def test_eager_calls_are_compiled_ones():
    x, own = reference.normal(4, 32), params_of(("mxfp8",) * 2, (((1,), (0,)), ((), ())))
    eager, jitted = (
        block_dot_p.bind(x, x.T, **own),
        jax.jit(lambda x: block_dot_p.bind(x, x.T, **own)),
    )
    np.testing.assert_array_equal(eager, jitted(x))


def test_check_fp8_names_the_formats_and_says_why_there_is_no_kernel():
    x = jnp.ones((32, 64))

    def fun(x, backward="mxfp8_e5m2"):
        dot = lambda w: jsa.nn.matmul(x, w, forward_dtype="mxfp8_e5m2", backward_dtype=backward)  # noqa: E731
        return jax.vjp(dot, x.T)[1](jnp.ones((32, 32)))

    (row,) = jsa.numerics.check_fp8(fun, x, compile=False).rows
    assert (row.lhs, row.rhs, row.eligible, row.phase) == ("mxfp8_e5m2",) * 2 + (False, "backward")
    assert "no block-scaled kernel multiplies mxfp8_e5m2 x mxfp8_e5m2" in row.notes[0]
    report = jsa.numerics.check_fp8(
        jax.jit(lambda x: jsa.nn.matmul(x, x.T, forward_dtype="nvfp4")), x
    )
    assert report.rows[0].eligible and report.rows[0].is_fp8 is False
    assert "written out, with elements times block scales in f32" in report.rows[0].notes[-1]
    with pytest.raises(ValueError, match="0 of 1 matmuls of FP8 operands are FP8 kernels on cpu"):
        jsa.numerics.check_fp8(
            lambda x: jsa.nn.matmul(x, x.T, forward_dtype="nvfp4"), x, error=True
        )


@pytest.mark.parametrize("shapes", [((0, 32), (32, 4)), ((4, 0), (0, 4)), ((4, 32), (32, 0))])
def test_empty_operands_have_no_kernel(shapes):
    """XLA's compiler for CUDA ends with an internal error where rows are missing."""
    product = functools.partial(jsa.nn.matmul, forward_dtype="mxfp8")
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    lowered = jax.jit(product).trace(*args).lower(lowering_platforms=("cuda",))
    assert "custom_call" not in lowered.as_text()
