"""Functions with derivative rules of every kind, and the derivatives that are taken of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.ode import odeint

import jax_scalify as jsa
from jax_scalify import ScaledArray
from tests.helpers import in_float64

X = np.array([[0.5, -1.5, 2.0], [-0.75, 1.25, 3.0]], np.float32)


def outside(fun, convert=jsa.as_scaled_array):
    """The scalified function, as a function of plain arrays."""
    return lambda *xs: jsa.asarray(jsa.scalify(fun)(*map(convert, xs)), jnp.float32)


# Functions with derivative rules of their own.


@jax.custom_jvp
def square_jvp(x):
    return x * x


@square_jvp.defjvp
def _square_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return square_jvp(x), 3 * x * t


@jax.custom_vjp
def square_vjp(x):
    return x * x


square_vjp.defvjp(lambda x: (square_vjp(x), x), lambda x, ct: (3 * x * ct,))


def _nested(square):
    """Functions that call one with a rule in every place where it can be called."""
    return {
        "direct": square,
        "jit": jax.jit(lambda x: jax.jit(square)(x) * x),
        "vmap": jax.vmap(jax.vmap(square)),
        "scan": lambda x: lax.scan(lambda c, v: (c * 0.5 + square(v), square(c)), x[0], x),
        "fori": lambda x: lax.fori_loop(0, 2, lambda i, c: c * 0.5 + square(x), x),
        "cond": lambda x: lax.cond(x[0, 0] < x[0, 2], lambda v: square(v), lambda v: v, x),
        "switch": lambda x: lax.switch(1, [jnp.negative, square], x),
        "remat": jax.checkpoint(lambda x: square(x) * x),
        "remat-scan": lambda x: lax.scan(
            jax.checkpoint(lambda c, v: (c * 0.5 + square(v) * 2, None)), x[0], x
        )[0],
        "twice": lambda x: square(square(x) * 0.5) / x,
        "operand-twice": lambda x: square(x) * square(x + x) / x,
        "some-elements": lambda x: x.at[0].set(square(x[1])),
        "and-others": lambda x: (square(x), x * 2, jnp.ones(3, x.dtype), jnp.arange(2)),
    }


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def power_jvp(fun, x, n):
    return fun(x) ** n


@power_jvp.defjvp
def _power_jvp(fun, n, primals, tangents):
    return power_jvp(fun, primals[0], n), 5 * primals[0] * tangents[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def power_vjp(fun, x, n):
    return fun(x) ** n


power_vjp.defvjp(
    lambda fun, x, n: (power_vjp(fun, x, n), x), lambda fun, n, x, ct: (5 * fun(x) * ct,)
)


@jax.custom_jvp
def pick_jvp(tree, i):
    return {"row": tree["x"][i], "all": tree["x"] * tree["y"]}, i + 1


@pick_jvp.defjvp
def _pick_jvp(primals, tangents):
    (tree, i), (dot, _) = primals, tangents
    slopes = {"row": 2 * dot["x"][i], "all": tree["x"] * dot["x"] + 7 * dot["y"] * tree["y"]}
    return pick_jvp(tree, i), (slopes, np.zeros((), jax.dtypes.float0))


@jax.custom_vjp
def pick_vjp(tree, i):
    return {"row": tree["x"][i], "all": tree["x"] * tree["y"]}, i + 1


def _pick_backward(residuals, cts):
    tree, i = residuals
    ct = cts[0]
    x = jnp.zeros_like(tree["x"]).at[i].set(2 * ct["row"]) + tree["x"] * ct["all"]
    return {"x": x, "y": 7 * tree["y"] * ct["all"]}, None


pick_vjp.defvjp(lambda tree, i: (pick_vjp(tree, i), (tree, i)), _pick_backward)


@jax.custom_jvp
def product_jvps(x, y):
    return x * y


product_jvps.defjvps(lambda t, out, x, y: 2 * y * t, None)


@jax.custom_jvp
def product_zeros_jvp(x, y):
    return x * y


@functools.partial(product_zeros_jvp.defjvp, symbolic_zeros=True)
def _product_zeros_jvp(primals, tangents):
    (x, y), (t, zero) = primals, tangents
    factor = 2 if isinstance(zero, jax.custom_derivatives.SymbolicZero) else 9
    return product_zeros_jvp(x, y), factor * y * t


@jax.custom_vjp
def product_zeros_vjp(x, y):
    return x * y


product_zeros_vjp.defvjp(
    lambda x, y: (x.value * y.value, (y.value, 2 if not y.perturbed else 9)),
    lambda residuals, ct: (residuals[1] * residuals[0] * ct, None),
    symbolic_zeros=True,
)


@jax.custom_vjp
def optimized(x):
    return x * x


optimized.defvjp(lambda x: (x * x, x), lambda x, ct: (3 * x * ct,), optimize_remat=True)


@jax.custom_gradient
def square_gradient(x):
    return x * x, lambda ct: (3 * x * ct,)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.5, 0.5),))


def _converted(x):
    """The rule's function closes over a value that is differentiated."""
    fun, consts = jax.closure_convert(lambda v: v * x, x)

    @jax.custom_vjp
    def product(v, *consts):
        return fun(v, *consts)

    product.defvjp(
        lambda v, *consts: (product(v, *consts), (v, consts)),
        lambda residuals, ct: (residuals[1][0] * ct, *(4 * residuals[0] * ct for _ in consts)),
    )
    return product(x, *consts)


_OF_JVP = {
    "nondiff_argnums": lambda x: power_jvp(jnp.negative, x, 2),
    "trees-integers": lambda x: pick_jvp({"x": x, "y": x + 1}, jnp.int32(1)),
    "defjvps": lambda x: product_jvps(x, x),
    "symbolic_zeros": lambda x: product_zeros_jvp(x, jnp.asarray(X, x.dtype)),
    "rule-in-rule": lambda x: power_jvp(square_jvp, x, 1),
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "relu-silu": lambda x: jax.nn.silu(jax.nn.relu(x)),
}
_OF_VJP = {
    "nondiff_argnums": lambda x: power_vjp(jnp.negative, x, 2),
    "trees-integers": lambda x: pick_vjp({"x": x, "y": x + 1}, jnp.int32(1)),
    "symbolic_zeros": lambda x: product_zeros_vjp(x, jnp.asarray(X, x.dtype)),
    "optimize_remat": jax.checkpoint(lambda x: optimized(x) * x),
    "custom_gradient": square_gradient,
    "gradient-clipping": lambda x: square_vjp(clipped(x)),
    "closure_convert": _converted,
    "jvp-inside": lambda x: power_vjp(square_jvp, x, 1),
    "jvp-beside": lambda x: square_jvp(x) + square_vjp(x) * 2 + jax.nn.relu(x),
}
FUNCTIONS = {
    **{f"jvp-{name}": f for name, f in {**_nested(square_jvp), **_OF_JVP}.items()},
    **{f"vjp-{name}": f for name, f in {**_nested(square_vjp), **_OF_VJP}.items()},
}


# Ways to differentiate.


def floating_of(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def _weights(x):
    return jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) + 1.5


def total(tree):
    """A loss to which every element of every result contributes in its own way."""
    return sum(jnp.sum(x * _weights(x)) for x in floating_of(tree))


def grad_of(f):
    return jax.grad(lambda x: total(f(x)))


def vjp_of(f):
    def way(x):
        out, pullback = jax.vjp(lambda x: floating_of(f(x)), x)
        return out, pullback([_weights(o) for o in out])

    return way


def _linearize(f):
    def way(x):
        out, slope = jax.linearize(lambda x: floating_of(f(x)), x)
        return out, slope(x * _weights(x)), slope(2 * x)

    return way


def _batch(x):
    return jnp.stack([x, x * 0.5])


FORWARD = {
    "jvp": lambda f: lambda x: jax.jvp(lambda x: floating_of(f(x)), (x,), (x * _weights(x),)),
    "linearize": _linearize,
    "jacfwd": lambda f: jax.jacfwd(lambda x: floating_of(f(x))),
    "jvp-vmap": lambda f: lambda x: jax.jvp(jax.vmap(f), (_batch(x),), (_batch(x * _weights(x)),)),
    "vmap-jvp": lambda f: lambda x: jax.vmap(FORWARD["jvp"](f))(_batch(x)),
    "jit-jvp": lambda f: jax.jit(FORWARD["jvp"](f)),
}
REVERSE = {
    "grad": grad_of,
    "value_and_grad": lambda f: jax.value_and_grad(
        lambda x: (total(f(x)), {"out": f(x)}), has_aux=True
    ),
    "vjp": vjp_of,
    "jacrev": lambda f: jax.jacrev(lambda x: floating_of(f(x))),
    "vmap-grad": lambda f: lambda x: jax.vmap(grad_of(f))(_batch(x)),
    "grad-vmap": lambda f: lambda x: jax.grad(lambda x: total(jax.vmap(f)(x)))(_batch(x)),
    "jit-grad": lambda f: jax.jit(grad_of(f)),
    "grad-jit": lambda f: grad_of(jax.jit(f)),
    "grad-remat": lambda f: grad_of(jax.checkpoint(f)),
    "grad-scan": lambda f: jax.grad(
        lambda x: total(lax.scan(lambda c, v: (c + 1, f(v * c)), jnp.ones((), x.dtype), _batch(x)))
    ),
}
SECOND = {"hessian": lambda f: jax.hessian(lambda x: total(f(x)))}
SECOND_REVERSE = {"grad-grad": lambda f: jax.grad(lambda x: total(grad_of(f)(x)))}


KINDS = {
    "scale-2": lambda x: jsa.as_scaled_array(x, scale=2.0),
    "static": lambda x: ScaledArray(x / 4, 4.0),
    "per-axis": lambda x: jsa.as_scaled_array(x, scale=jnp.array([[4.0], [0.125]])),
    "per-last-axis": lambda x: jsa.as_scaled_array(x, scale=jnp.array([4.0, 0.125, 1.0])[None]),
    "per-row-leading": lambda x: ScaledArray(x / 4, jnp.array([4.0, 4.0])),
    "rms": lambda x: jsa.as_scaled_array(x, scale="rms"),
    "rms-axis": lambda x: jsa.as_scaled_array(x, scale="rms", axis=0),
    "rescaled": lambda x: jsa.dynamic_rescale(jsa.as_scaled_array(x)),
    "float16": lambda x: jsa.as_scaled_array(x, dtype=jnp.float16),
    "bfloat16": lambda x: jsa.as_scaled_array(x, dtype=jnp.bfloat16),
    "float16-static": lambda x: ScaledArray((x / 4).astype(jnp.float16), 4.0),
}


def in_units_of_results(fun, x):
    """`fun` with floating results of unit size, so that cotangents of float16 data are in range."""
    units = [
        2.0 ** np.round(np.log2(np.abs(out).max()))
        for out in in_float64(lambda x: floating_of(fun(x)), x)
    ]

    def units_of(call):
        return lambda x: [o / u for o, u in zip(floating_of(call(x)), units, strict=True)]

    return units_of


def _newton(f, y):
    return lax.fori_loop(0, 6, lambda i, y: y - f(y) / jax.jvp(f, (y,), (jnp.ones_like(y),))[1], y)


def root(x):
    return lax.custom_root(
        lambda y: y * y - x, jnp.ones_like(x) * 2, _newton, lambda g, b: b / g(jnp.ones_like(b))
    )


def _diagonal(x):
    return x + jnp.asarray([[2.0], [4.0]], x.dtype)


def linear_solve(x):
    return lax.custom_linear_solve(
        lambda v: _diagonal(x) * v, x * x, lambda f, b: b / f(jnp.ones_like(b)), symmetric=True
    )


def linear_solve_transposed(x):
    matrix = x + 4 * jnp.eye(2, dtype=x.dtype)
    return lax.custom_linear_solve(
        lambda v: matrix @ v,
        x[0] * 2,
        lambda f, b: jnp.linalg.inv(lax.stop_gradient(matrix)) @ b,
        transpose_solve=lambda f, b: jnp.linalg.inv(lax.stop_gradient(matrix)).T @ b,
    )


def conjugate_gradients(x):
    matrix = x @ x.T + 4 * jnp.eye(2, dtype=x.dtype)
    return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x[0], maxiter=4)[0]


def generalised_minimal_residual(x):
    """Two coupled equations, of a matrix that is not symmetric."""
    matrix = x + 4 * jnp.eye(2, dtype=x.dtype)

    def matvec(v):
        return {"a": matrix @ v["a"] + v["b"], "b": matrix.T @ v["b"]}

    solution, _ = jax.scipy.sparse.linalg.gmres(matvec, {"a": x[0], "b": 3 * x[1]}, maxiter=4)
    return jnp.stack([solution["a"], solution["b"]])


def ode(x):
    return odeint(lambda y, t, k: -k * y, x[0], jnp.array([0.0, 0.5, 1.0], x.dtype), x[1])


POSITIVE = np.array([[0.5, 1.5], [2.0, 0.75]], np.float32)


IMPLICIT = {
    "root": (root, 2e-5),
    "linear_solve": (linear_solve, 2e-5),
    "linear_solve-transposed": (linear_solve_transposed, 2e-5),
    "cg": (conjugate_gradients, 1e-4),
    "gmres": (generalised_minimal_residual, 1e-4),
    "solve": (lambda x: jnp.linalg.solve(x + 4 * jnp.eye(2, dtype=x.dtype), x[0]), 2e-5),
    "odeint": (ode, 2e-5),
}


REFUSED = {
    "grad": lambda f, x: jax.grad(f)(x),
    "grad-of-value": lambda f, x: jax.grad(lambda x: jsa.asarray(f(x)))(x),
    "value_and_grad": lambda f, x: jax.value_and_grad(f)(x),
    "vjp": lambda f, x: jax.vjp(f, x)[1](f(x)),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "in-a-tree": lambda f, x: jax.grad(lambda p: jsa.asarray(f(p["w"])))({"w": x, "v": x.data}),
    "under-vmap": lambda f, x: jax.vmap(jax.grad(lambda x: jsa.asarray(f(x))))(
        ScaledArray(x.data, jnp.ones(2))
    ),
    "of-the-scale": lambda f, x: jax.grad(lambda s: jsa.asarray(f(ScaledArray(x.data, s))))(
        x.scale
    ),
}


LOSSES = {
    "plain": lambda x: jnp.sum(x * x),
    "jvp": lambda x: jnp.sum(square_jvp(x)),
    "vjp": lambda x: jnp.sum(square_vjp(x)),
}
