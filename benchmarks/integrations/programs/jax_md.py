"""A graph network of jax-md learns energy and forces of a Morse potential.

The forces are derivatives of the energy inside the loss, so its gradient is one of second order.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax_md import energy, quantity, space

from benchmarks.integrations.programs.training import Problem

PARTICLES, CONFIGURATIONS, BOX = 8, 8, 4.0


def problem() -> Problem:
    displacement, _ = space.periodic(BOX)
    true_energy = energy.morse_pair(displacement, sigma=1.2, alpha=2.0)
    label = jax.jit(jax.vmap(lambda r: (true_energy(r), quantity.force(true_energy)(r))))
    network = energy.graph_network(
        displacement,
        r_cutoff=2.0,
        key=jax.random.key(0),
        mlp_sizes=(16, 16),
        n_recurrences=1,
        activation=jax.nn.softplus,
    )
    graph, params, rest = nnx.split(network.model, nnx.Param, ...)

    def loss_fn(params, batch, key):
        def energy_fn(positions):
            return nnx.merge(graph, params, rest)(positions)

        def predict(positions):
            return energy_fn(positions), quantity.force(energy_fn)(positions)

        positions, energies, forces = batch
        found, found_forces = jax.vmap(predict)(positions)
        errors = (found.reshape(-1) - energies) / PARTICLES, found_forces - forces
        return sum(jnp.mean(jnp.square(e.astype(jnp.float32))) for e in errors)

    def batches(steps: int) -> Iterator[tuple[np.ndarray, ...]]:
        rng = np.random.default_rng(0)
        sites = BOX / 2 * np.stack(np.meshgrid(*[[0.25, 0.75]] * 3), -1).reshape(-1, 3)
        for _ in range(steps):
            noise = rng.normal(size=(CONFIGURATIONS, PARTICLES, 3))
            positions = np.float32((1.3 * sites + 0.05 * noise) % BOX)
            yield positions, *map(np.asarray, label(positions))

    return Problem(loss_fn, nnx.to_pure_dict(params), batches, optax.adamw(1e-3))
