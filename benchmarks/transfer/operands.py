"""RMS of what the matmuls of weights multiply, in both passes: the tensors of u-µP's figures.

Blake et al., *u-µP* (2024), look at the inputs of linear layers, at their weights and at the
gradients of their results: these are the operands of the three matmuls of a layer, and what FP8
would round. Results are sums that are multiplied by their factor before anything else reads them;
attention's probabilities, the sums of its rows and the angles of its rotary embedding do not leave
their operation. None of these is in the table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_scalify.base.jaxprs import applied, evaluate

KINDS = ("inputs", "weights", "gradients of results", "gradients of weights")
_KEEP_NAMES = frozenset("mul transpose convert_element_type copy".split())
Found = dict[str, dict[str, float]]


class _Named(NamedTuple):
    """An array, and the name of the weight that it is a copy or a multiple of."""

    array: Any
    name: str | None = None


def rms(x: jax.Array) -> float:
    """Return the root of the mean square."""
    return float(jnp.sqrt(jnp.mean(jnp.square(x))))


def rms_of_operands(loss: Callable[[Any], jax.Array], params: Any) -> Found:
    """Return the RMS values by kind and name of the weight.

    Args:
        loss: of the parameters, whose weights each multiply once in the forward pass.
        params: any pytree.
    """
    paths = [p for p, _ in jax.tree.leaves_with_path(params)]
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p in paths]
    leaves, structure = jax.tree.flatten(params)

    def both(*leaves: Any) -> Any:
        return jax.value_and_grad(loss)(jax.tree.unflatten(structure, leaves))

    found: Found = {kind: {} for kind in KINDS}

    def equation(eqn: Any, operands: list[_Named]) -> list[_Named]:
        call, name = applied(eqn), eqn.primitive.name
        if call is not None:
            return evaluate(call, operands, equation, literal, constant)
        if name == "dot_general":
            _look(found, operands)
        arrays = [x.array for x in operands]
        out = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
        kept = next((x.name for x in operands if x.name), None) if name in _KEEP_NAMES else None
        return [_Named(x, kept) for x in (out if eqn.primitive.multiple_results else [out])]

    def literal(atom: Any) -> _Named:
        return _Named(atom.val)

    def constant(var: Any, value: Any) -> _Named:
        return _Named(value)

    closed = jax.make_jaxpr(both)(*leaves)
    operands = [_Named(x, name) for x, name in zip(leaves, names, strict=True)]
    _, *grads = evaluate(closed, operands, equation, literal, constant)
    for name, grad in zip(names, grads, strict=True):
        found["gradients of weights"][name] = rms(grad.array)
    return found


def _look(found: Found, operands: list[_Named]) -> None:
    """Look at the operands of a matmul of a weight: first with an input, then with a gradient."""
    weight = next((x for x in operands if x.name), None)
    if weight is None:
        return
    (other,) = (x for x in operands if x is not weight)
    kind = "gradients of results" if weight.name in found["inputs"] else "inputs"
    found[kind][weight.name] = rms(other.array)
    found["weights"][weight.name] = rms(weight.array)
