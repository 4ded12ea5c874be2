"""Name stacks and source lines: a profile of the scalified program still names the user's code."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_scalify as jsa
from tests.helpers import replace_rule


@jax.jit
def _inner(x):
    with jax.named_scope("inner"):
        return jnp.sin(x) * 2


def _layer(h, w):
    with jax.named_scope("layer"):
        return jnp.tanh(h @ w) + h


def _called(x):
    with jax.named_scope("first"):
        h = _inner(x)
    with jax.named_scope("second"):
        return _inner(h)


def _scanned(x):
    return lax.scan(lambda h, w: (jax.checkpoint(_layer)(h, w), None), x, jnp.stack([x, 2 * x]))[0]


def _looped(x):
    return lax.while_loop(lambda h: jnp.sum(h) < 100, lambda h: _layer(h, h.T) + 1, x)


def _branched(x):
    return lax.cond(x[0, 0] > 0, lambda h: _layer(h, h.T), jnp.cos, x)


def _loss(fun):
    def loss(x):
        with jax.named_scope("head"):
            return jnp.sum(jax.nn.log_softmax(fun(x)) ** 2)

    return loss


FUNCTIONS = {
    "called": _called,
    "scanned": _scanned,
    "looped": _looped,
    "branched": _branched,
    "called-gradient": jax.grad(_loss(_called)),
    "scanned-gradient": jax.grad(_loss(_scanned)),
    "branched-gradient": jax.grad(_loss(_branched)),
}
X = jnp.ones((4, 4))


def _texts(name):
    """The plain and the scalified program: as lowered, with its locations, and as compiled."""
    fun = FUNCTIONS[name]
    for f, x in ((fun, X), (jsa.scalify(fun), jsa.as_scaled_array(X))):
        lowered = jax.jit(f).lower(x)
        yield lowered.as_text(debug_info=True), lowered.compile().as_text()


def _scopes(lowered, compiled):
    """The scopes of the operations: as lowered, and their parts that XLA has left."""
    names = re.findall(r'loc\("([^"]*)"\(', lowered), re.findall(r'op_name="([^"]*)"', compiled)
    scopes, left = ({n.rpartition("/")[0] for n in found} for found in names)
    return scopes, {part for scope in left for part in scope.split("/")}


def _lines(lowered):
    """Line numbers of this file."""
    return set(re.findall(r'test_provenance.py":(\d+)', lowered))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_scopes_and_source_lines_reach_the_program(name):
    plain, ours = _texts(name)
    assert _lines(plain[0]) <= _lines(ours[0])
    for expected, got in zip(_scopes(*plain), _scopes(*ours), strict=True):
        assert expected <= got
        assert any("layer" in s or "inner" in s for s in got)


def test_operations_keep_their_own_name():
    (plain, _), (ours, _) = _texts("scanned-gradient")
    for name in ("dot_general", "tanh"):
        found = [set(re.findall(rf'loc\("([^"]*/{name})"', text)) for text in (plain, ours)]
        assert found[0] and found[0] == found[1]


@pytest.mark.parametrize("name", ["called", "scanned", "looped", "branched"])
def test_an_error_in_a_rule_names_the_line_and_the_primitive(name, monkeypatch):
    def broken(ctx, x, **params):
        raise RuntimeError("no")

    primitives = {"called": lax.sin_p, "branched": lax.cos_p}
    primitive = primitives.get(name, lax.tanh_p)
    replace_rule(monkeypatch, primitive, broken)
    with pytest.raises(RuntimeError) as error:
        jsa.scalify(FUNCTIONS[name])(jsa.as_scaled_array(X))
    (note,) = [n for n in error.value.__notes__ if "jax_scalify" in n]
    assert primitive.name in note and "test_provenance.py" in note and "float32[4, 4]" in note
