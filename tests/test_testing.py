"""`check_scale_rule` passes good rules, and names what is wrong with bad ones."""

import jax.numpy as jnp
import numpy as np
import pytest

import jax_scalify as jsa
from jax_scalify import ScaledArray
from jax_scalify.interpreter import registry
from jax_scalify.testing import check_scale_rule
from tests.opaque import opaque_primitive

X = np.float16([[1.0, -2.5, 0.25], [3.0, 0.5, -1.0]])


triple_p = opaque_primitive("triple", lambda x: x * 3)
WAYS = ("eager", "jit", "scan")  # the primitive has no batching rule


def triple(x):
    return triple_p.bind(x)


@pytest.fixture(autouse=True)
def forget_the_rule():
    yield
    for primitive in (triple_p, row_sums_p):
        registry._rules.pop(primitive, None)


def test_a_rule_in_three_lines():
    @jsa.register_scale_rule(triple_p)
    def triple_rule(ctx, x, **params):
        """`out = f(data)`, scale unchanged."""
        return ScaledArray(ctx.bind(x.data, **params), x.scale)

    check_scale_rule(triple, X, ways=WAYS)
    info = next(i for i in registry.registered_rules() if i.name == "triple")
    assert (info.family, info.law) == ("custom", "`out = f(data)`, scale unchanged.")


BAD = {
    "Meaning": lambda ctx, x: ScaledArray(ctx.bind(x.data), x.scale * 2),
    "Meaning.*scale": lambda ctx, x: ScaledArray(
        ctx.bind(ctx.dequantise(x, x.dtype)), 1.0
    ),  # quietly dequantised to float16
    "Power of two": lambda ctx, x: ScaledArray(
        ctx.bind(x.data / 3), jnp.asarray(x.scale.array) * 3
    ),
    "No hidden statistics": lambda ctx, x: (
        lambda peak: ScaledArray(ctx.bind(x.data / peak), x.scale.array * peak)
    )(jnp.exp2(jnp.floor(jnp.log2(jnp.max(abs(x.data))))).astype(jnp.float32).astype(x.dtype)),
    "float32": lambda ctx, x: ScaledArray(ctx.bind(x.data).astype(jnp.float32), x.scale),
    "Scale 0 means data 0": lambda ctx, x: ScaledArray(ctx.bind(x.data) + 1, x.scale),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_rule_is_named(message):
    jsa.register_scale_rule(triple_p)(BAD[message])
    scales = (0.0,) if "data 0" in message else (2.0**-20, 1.0, 2.0**20)
    error = TypeError if message == "float32" else AssertionError
    with pytest.raises(error, match=f"(?s){message}"):
        check_scale_rule(triple, X, ways=("jit",), scales=scales)


def test_a_missing_rule_is_an_error():
    with pytest.raises(jsa.MissingRuleError, match="triple"):
        check_scale_rule(triple, X, ways=("eager",))


row_sums_p = opaque_primitive("row_sums", lambda x: jnp.sum(x, -1))


def _with_a_rule(rule, kind):
    """A function that sums over the last axis, with a scale rule of an operand."""
    if kind == "primitive":
        jsa.register_scale_rule(row_sums_p)(lambda ctx, x: rule(x))
        return row_sums_p.bind

    @jsa.custom_scale
    def row_sums(x):
        return jnp.sum(x, -1)

    row_sums.defscale(rule)
    return row_sums


@pytest.mark.parametrize("kind", ["custom_scale", "primitive"])
def test_a_rule_that_adds_data_at_several_scales_is_told_the_remedy(kind):
    total = _with_a_rule(lambda x: ScaledArray(jnp.sum(x.data, -1), x.scale), kind)
    with pytest.raises(TypeError) as caught:
        check_scale_rule(total, X, ways=WAYS)
    message = str(caught.value)
    assert "must return a scale of shape () or one that fits [2], got [2, 1]" in message
    assert "bring the operand to one scale first: `data, scale = jsa.get_data_and_scale(x)`" in (
        message
    )
    assert any("jit, scales ['4 (2, 1)']" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("kind", ["custom_scale", "primitive"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_rule_that_reduces_brings_its_operand_to_one_scale(kind, dtype):
    def rule(x):
        data, scale = jsa.get_data_and_scale(x)
        assert scale.shape == () and data.dtype == dtype
        return ScaledArray(jnp.sum(data, -1), scale)

    total = _with_a_rule(rule, kind)
    check_scale_rule(total, X.astype(dtype), ways=WAYS)


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ValueError, match="`ways` must be among"):
        check_scale_rule(jnp.negative, X, ways=("pmap",))
    with pytest.raises(ValueError, match="`args` must hold a floating array"):
        check_scale_rule(jnp.negative, np.arange(3))
    for refused in (dict(scales=(1.0, 3.0)), dict(static_scale=0.3)):
        with pytest.raises(ValueError, match="must be powers of two"):
            check_scale_rule(jnp.negative, X, **refused)


def test_all_operands_may_be_zero():
    check_scale_rule(jnp.add, X, X, ways="jit", scales=(0.0,), static_scale=None)


def test_one_way_may_be_given_by_its_name():
    check_scale_rule(jnp.negative, X, ways="jit")
