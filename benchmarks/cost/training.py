"""Training steps of a model, in shapes only: as people train in bfloat16, and by our recipe."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa

PyTree = Any
STATIC_SCALE = 2.0**-5  # of every frozen leaf: which one it is makes no difference to the program
SMALL = 4096  # elements: what is smaller is on every device


@dataclasses.dataclass(frozen=True)
class Model:
    """What a step trains.

    Attributes:
        init: `init(key) -> (params, other)` in float32; `other` has the statistics of batch norm.
        loss: `loss(params, other, batch, dtype) -> (loss, other)`, activations in `dtype`.
        batch: shapes and dtypes of a batch, of all devices.
    """

    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    loss: Callable[[PyTree, PyTree, PyTree, Any], tuple[jax.Array, PyTree]]
    batch: PyTree


def make_optimizer() -> optax.GradientTransformation:
    """AdamW behind clipping by the global norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step that can be compiled: `update(state, batch) -> (state, loss)`.

    Attributes:
        update: the step.
        state: shapes and dtypes of its state.
        batch: likewise, of a batch.
        init: `init(key) -> state`, with dynamic scales, also of what is static in `state`.
    """

    update: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array]]
    state: PyTree
    batch: PyTree
    init: Callable[[jax.Array], PyTree]

    def jitted(self) -> Any:
        """The step as it is run: its state donated, and where it was."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        if any(s is None for s in jax.tree.leaves(shardings, is_leaf=lambda s: s is None)):
            return jax.jit(self.update, donate_argnums=0)
        return jax.jit(self.update, donate_argnums=0, out_shardings=(shardings, None))


def plain_step(model: Model, devices: int = 1, dtype: Any = jnp.bfloat16) -> Step:
    """The step that is compared with: weights and state in float32, the model in `dtype`."""
    optimizer = make_optimizer()

    def loss(params: PyTree, other: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        return model.loss(jax.tree.map(lambda w: w.astype(dtype), params), other, batch, dtype)

    def update(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        params, other, opt_state = state
        (value, other), grads = jax.value_and_grad(loss, has_aux=True)(params, other, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), other, opt_state), value

    def make(key: jax.Array) -> PyTree:
        params, other = model.init(key)
        return params, other, optimizer.init(params)

    state = jax.eval_shape(make, jax.random.key(0))
    return _sharded(Step(update, state, model.batch, make), devices)


def scaled_step(
    model: Model,
    devices: int = 1,
    *,
    fp8: bool = False,
    dynamic: bool = False,
    frozen: bool = False,
    recompute: bool = False,
    activations: Any = jnp.float16,
    **formats: Any,
) -> Step:
    """The README's recipe: everything in float16, weights at static scales; or with FP8 matmuls.

    With `dynamic`, the weights' scales are dynamic too; with `frozen`, all scales are static. With
    FP8, the backward pass may `recompute` activation functions, and `formats` are those of
    `fp8_matmuls`; `activations` have a dtype of their own.
    """
    optimizer = jsa.optim.low_precision(make_optimizer())

    def loss(params: PyTree, other: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        return model.loss(params, other, batch, activations)

    if fp8:
        loss = jsa.fp8_matmuls(loss, jsa.fp8.linear_layers, recompute=recompute, **formats)

    @jsa.scalify
    def update(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        params, other, opt_state = state
        (value, other), grads = jax.value_and_grad(loss, has_aux=True)(params, other, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new = jsa.optim.apply_updates(params, updates), other, opt_state
        return (jsa.match_scales(new, state) if frozen else new), value

    def make(key: jax.Array) -> PyTree:
        params, other = model.init(key)
        params = jsa.as_scaled_array(params, scale="rms", dtype="float16")
        return params, *jsa.as_scaled_array((other, optimizer.init(params)))

    params, *rest = jax.eval_shape(make, jax.random.key(0))
    params = params if dynamic else jsa.tree.map(freeze, params)
    state = params, *(jsa.tree.map(freeze, rest) if frozen else rest)
    return _sharded(Step(update, state, model.batch, make), devices)


def rows_sharding(devices: int) -> NamedSharding | None:
    """How a batch is cut over the devices, if there are several."""
    return NamedSharding(mesh_of(devices), P("data")) if devices > 1 else None


def freeze(leaf: Any) -> Any:
    """Give a leaf of the state a static scale."""
    return jsa.ScaledArray(leaf.data, STATIC_SCALE) if isinstance(leaf, jsa.ScaledArray) else leaf


def mesh_of(devices: int) -> AbstractMesh:
    """Devices that need not be there, in a row."""
    return AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))


def _sharded(step: Step, devices: int) -> Step:
    """Cut every array along its largest axis that the devices divide, as FSDP does."""
    if devices == 1:
        return step

    def cut(leaf: Any) -> Any:
        axes = [a for a, n in enumerate(leaf.shape) if n % devices == 0 and leaf.size > SMALL]
        largest = max(axes, key=lambda a: leaf.shape[a], default=None)
        spec = P(*("data" if a == largest else None for a in range(leaf.ndim)))
        sharding = NamedSharding(mesh_of(devices), spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def give(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows_sharding(devices))

    state, batch = jax.tree.map(cut, step.state), jax.tree.map(give, step.batch)
    return dataclasses.replace(step, state=state, batch=batch)
