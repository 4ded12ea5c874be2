"""Keras 3 on JAX: `Scalified` trains a model in float16 or FP8 with `model.fit`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jax_scalify import checkpoint, tree
from jax_scalify.conversions.trees import as_scaled_array, asarray
from jax_scalify.optim.applying import apply_updates
from jax_scalify.optim.low_precision import low_precision
from jax_scalify.optim.stateless import from_stateless
from jax_scalify.transform import scalify

__all__ = ["Scalified"]

_PARTS = tuple(f"{name}_variables" for name in "trainable non_trainable optimizer metrics".split())


class Scalified:
    """A base class, listed before `keras.Model`, that trains with `scalify`.

    While `fit` runs, weights are float16 data at static scales, by RMS, and the state of the
    optimizer is that of `jsa.optim.low_precision`. When an epoch ends, and whenever Keras or a
    callback reads variables, these are float32 again. So `evaluate`, `predict`, `save` and
    callbacks work as before. The optimizer is one of Keras' own.

    Attributes:
        state_dtype: the dtype of weights and optimizer state. By default the dtype that the model
            computes in: float16 with the policy "mixed_float16", else float32.
        compute_loss_and_updates: a method of Keras. Override it to have FP8 matmuls, with
            `jsa.fp8_matmuls(super().compute_loss_and_updates)`.

    Raises:
        TypeError: if a class lists it after a Keras model, or, when compiled, if no Keras model on
            JAX follows it.
        ValueError: when trained, if the optimizer is a `LossScaleOptimizer`, or if a weight is
            float16. With the policy "mixed_float16" weights are float32 outside `fit`.

    Example::

        class Model(Scalified, keras.Sequential):
            pass

        keras.config.set_dtype_policy("mixed_float16")
        model = Model([keras.layers.Dense(64, "relu"), keras.layers.Dense(10, dtype="float32")])
        model.compile(keras.optimizers.AdamW(1e-3), "mse")
        model.fit(x, y)
    """

    state_dtype: Any = None
    _scaling: Any = None

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        # After `keras.Model` in the list, none of these methods would be called.
        owners = [base for base in cls.__mro__ if "jax_state_sync" in vars(base)]
        if not issubclass(owners[0], Scalified):
            raise TypeError(f"{cls.__name__} must list `Scalified` before its Keras model.")

    def compile(self, *args: Any, auto_scale_loss: bool = False, **options: Any) -> None:
        """Configure the model as Keras does, but without a scale of the loss."""
        parent: Any = super()
        if not hasattr(parent, "jax_state_sync"):
            raise TypeError(
                f"{type(self).__name__} must be a Keras model with KERAS_BACKEND=jax: list "
                "`Scalified` before `keras.Model`, `keras.Sequential`, ..."
            )
        parent.compile(*args, auto_scale_loss=auto_scale_loss, **options)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Configure a model that is loaded."""
        saving = importlib.import_module("keras.saving")
        self.compile(**saving.deserialize_keras_object(config))
        model: Any = self
        if model.built:
            model.optimizer.build(model.trainable_variables)

    def train_step(self, state: Any, data: Any) -> Any:
        """Apply Keras' own training step inside `scalify`."""
        parent: Any = super()
        with self._scaling.applied():
            return scalify(parent.train_step)(state, data)

    def make_train_function(self, force: bool = False) -> None:
        """Convert the optimizer, and make the function that `fit` calls."""
        model: Any = self
        parent: Any = super()
        if model.train_function is None or force or self._scaling is None:
            self._scaling = _Scaling(model, self.state_dtype)
        parent.make_train_function(force)

    def jax_state_sync(self) -> None:
        """Write the state of the training step to the variables, in their dtypes."""
        state = getattr(self, "_jax_state", None)
        if state:
            # Keras keeps what is `None`: an evaluation has no state of the optimizer.
            self._jax_state = {
                name: part
                and [asarray(x, x.dtype if _is_integer(x) else jnp.float32) for x in part]
                for name, part in state.items()
            }
        parent: Any = super()
        parent.jax_state_sync()

    def _get_jax_state(self, **parts: Any) -> Any:
        parent: Any = super()
        state = parent._get_jax_state(**parts)
        return self._scaling.scaled(state) if parts.get("optimizer_variables") else state

    def _get_state_sharding_spec(self) -> Any:
        parent: Any = super()
        state = self._get_jax_state(**dict.fromkeys(_PARTS, True))
        return tree.shardings(state, parent._get_state_sharding_spec())


class _Scaling:
    """The scales of a model's weights, and its optimizer with state in few bits."""

    def __init__(self, model: Any, dtype: Any):
        weights = model.trainable_variables
        if hasattr(model.optimizer, "inner_optimizer"):
            raise ValueError(
                "`Scalified` needs no scale of the loss: pass the inner optimizer of the "
                "`LossScaleOptimizer` to `compile`, without `auto_scale_loss=True`."
            )
        for v in weights:
            if v.dtype not in ("float32", "float64"):
                raise ValueError(
                    f"The weight {v.path!r} must be float32 outside `fit`, got {v.dtype}: "
                    'choose the dtype policy "mixed_float16".'
                )
        if dtype is None:
            dtypes = {layer.compute_dtype for layer in model.layers if layer.trainable_variables}
            dtype = "float16" if "float16" in dtypes else "float32"
        self.dtype = jnp.dtype(dtype)
        values = [v.value for v in weights]
        scaled = as_scaled_array(values, scale="rms", dtype=self.dtype, static=True)
        self.scales = [x.scale for x in scaled]
        self.optimizer = model.optimizer
        variables = self.optimizer.variables
        self.slots = _slots([v.path for v in variables], [v.path for v in weights])
        inner = from_stateless(
            lambda params: self.grouped([jnp.zeros(v.shape, v.dtype) for v in variables]),
            self.plain_apply(self.optimizer.stateless_apply),
        )
        self.low_precision = low_precision(inner, self.dtype)

    def plain_apply(self, apply: Any) -> Any:
        """Return Keras' `stateless_apply` as a function of a grouped state."""

        def grouped_apply(state: Any, grads: Any, params: Any) -> Any:
            params, state = apply(self.flat(state), grads, params)
            return params, self.grouped(state)

        return grouped_apply

    def grouped(self, variables: list[Any]) -> dict[str, list[Any]]:
        """Return the optimizer's variables as lists with one for each weight, as optax has them."""
        return {
            slot: [None if i is None else variables[i] for i in places]
            for slot, places in self.slots.items()
        }

    def flat(self, groups: dict[str, list[Any]]) -> list[Any]:
        """Return grouped variables in Keras' order."""
        pairs = [
            (i, x)
            for slot, places in self.slots.items()
            for i, x in zip(places, groups[slot], strict=True)
            if i is not None
        ]
        return [x for _, x in sorted(pairs, key=lambda pair: pair[0])]

    def scaled(self, state: Any) -> Any:
        """Return a state of Keras, of plain arrays, as the state of the scalified step."""
        given = [[x.sharding for x in part] for part in state]
        weights, others, optimizer, metrics = state
        pairs = zip(weights, self.scales, strict=True)
        weights = [as_scaled_array(w, scale=s, dtype=self.dtype) for w, s in pairs]
        like = jax.eval_shape(self.low_precision.init, weights)
        optimizer = self.flat(checkpoint.from_storable(self.grouped(optimizer), like))
        scaled = weights, as_scaled_array(others), optimizer, as_scaled_array(metrics)
        # The scales lie on all devices from the first step on, so that it is compiled once.
        return jax.device_put(scaled, tree.shardings(scaled, tuple(given)))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the optimizer apply gradients with its state in few bits."""

        def stateless_apply(state: Any, grads: Any, params: Any) -> Any:
            updates, state = self.low_precision.update(grads, self.grouped(state), params)
            return apply_updates(params, updates), self.flat(state)

        # Keras tracks what is assigned to attributes of an optimizer.
        object.__setattr__(self.optimizer, "stateless_apply", stateless_apply)
        try:
            yield
        finally:
            object.__delattr__(self.optimizer, "stateless_apply")


def _slots(variables: list[str], weights: list[str]) -> dict[str, list[int | None]]:
    """Return the places of an optimizer's variables: for each slot, that of each weight.

    The first moment of the weight "dense/kernel" is "adam/dense_kernel_momentum". What belongs to
    no weight, such as the learning rate, is a slot of its own, whose list is longer than theirs.
    """
    slots: dict[str, list[int | None]] = {}
    prefixes = [f"{path.replace('/', '_')}_" for path in weights]
    for i, path in enumerate(variables):
        name = path.partition("/")[2]
        own = [w for w, prefix in enumerate(prefixes) if name.startswith(prefix)]
        if not own:
            slots[f"/{name}"] = [None] * len(weights) + [i]
            continue
        weight = max(own, key=lambda w: len(prefixes[w]))
        slot = name.removeprefix(prefixes[weight])
        slots.setdefault(slot, [None] * len(weights))[weight] = i
    return slots


def _is_integer(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.floating)
