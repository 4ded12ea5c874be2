"""A neural ODE fitted to spirals, as in Diffrax's example: adaptive steps, checkpointed adjoint."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_scalify as jsa
from benchmarks.integrations.programs import training
from benchmarks.integrations.programs.training import Problem, PyTree


class VectorField(eqx.Module):
    """The derivative of a state, from an MLP."""

    mlp: eqx.nn.MLP
    fp8: bool = eqx.field(static=True)

    def __call__(self, t: jax.Array, y: jax.Array, args: None) -> jax.Array:
        """Return dy/dt."""
        # Not around the loss: `fp8_matmuls` leaves functions with derivative rules as they are.
        return (jsa.fp8_matmuls(self.mlp) if self.fp8 else self.mlp)(y)


def problem(adjoint: diffrax.AbstractAdjoint | None = None, fp8: bool = False) -> Problem:
    """Return the fit of trajectories that start at random places."""
    adjoint = adjoint or diffrax.RecursiveCheckpointAdjoint()
    mlp = eqx.nn.MLP(2, 2, 32, 2, jax.nn.softplus, key=jax.random.key(0))
    params, static = eqx.partition(VectorField(mlp, fp8), eqx.is_inexact_array)

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        model = eqx.combine(params, static)
        times, trajectories = batch

        def solve(start: jax.Array) -> jax.Array:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(model),
                diffrax.Tsit5(),
                t0=times[0],
                t1=times[-1],
                dt0=times[1] - times[0],
                y0=start,
                saveat=diffrax.SaveAt(ts=times),
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-3),
                adjoint=adjoint,
            ).ys

        found = jax.vmap(solve)(trajectories[:, 0])
        return jnp.mean(jnp.square((found - trajectories).astype(jnp.float32)))

    def batches(steps: int):
        rng = np.random.default_rng(0)
        times = np.linspace(0.0, 2.0, 9, dtype=np.float32)
        for _ in range(steps):
            radius, angle = rng.uniform(0.6, 1.0, (16, 1)), rng.uniform(0, 2 * np.pi, (16, 1))
            r, phi = radius * np.exp(-0.3 * times), angle + 2 * times
            yield times, np.float32(np.stack([r * np.cos(phi), r * np.sin(phi)], -1))

    return Problem(loss_fn, params, batches, optax.adamw(3e-3))


def train(found: Problem, precision: str, steps: int) -> tuple[list[float], PyTree]:
    """Train as usual, but with FP8 matmuls in the vector field instead of around the loss."""
    if precision != "fp8":
        return training.train(found, precision, steps)
    return training.train(problem(fp8=True), "float16", steps)
