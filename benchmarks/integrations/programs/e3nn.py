"""An equivariant network of e3nn-jax, in Flax, learns the energy of small clusters of atoms.

Two layers of messages: a tensor product with spherical harmonics, scattered to the receivers, and
a gate, as in e3nn-jax's examples.
"""

from collections.abc import Iterator

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.integrations.programs.training import Problem

ATOMS, CLUSTERS, CUTOFF = 6, 8, 2.5


class Layer(nn.Module):
    irreps: str

    @nn.compact
    def __call__(self, nodes, vectors, senders, receivers):
        lengths = jnp.linalg.norm(vectors.array, axis=-1)
        radial = (
            e3nn.bessel(lengths, 6, CUTOFF) * e3nn.poly_envelope(5, 2, CUTOFF)(lengths)[:, None]
        )
        messages = e3nn.tensor_product(
            nodes[senders], e3nn.spherical_harmonics([0, 1, 2], vectors, normalize=True)
        ).regroup()
        weights = e3nn.flax.MultiLayerPerceptron((16, messages.irreps.num_irreps), jax.nn.silu)(
            radial
        )
        gathered = e3nn.scatter_sum(
            messages * weights, dst=receivers, output_size=nodes.shape[0]
        ) / jnp.sqrt(float(ATOMS))
        gates = e3nn.Irreps(self.irreps).filter(drop="0e").num_irreps
        out = e3nn.flax.Linear(f"{gates}x0e + {self.irreps}", name="mix")(gathered)
        return e3nn.gate(
            out + e3nn.flax.Linear(out.irreps, name="skip", force_irreps_out=True)(nodes)
        )


class Network(nn.Module):
    @nn.compact
    def __call__(self, positions, species, senders, receivers):
        vectors = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
        embedded = nn.Embed(2, 8, dtype=positions.dtype)(species)
        nodes = e3nn.IrrepsArray("8x0e", embedded)
        for _ in range(2):
            nodes = Layer("8x0e + 4x1o + 2x2e")(nodes, vectors, senders, receivers)
        return e3nn.flax.Linear("0e", name="head")(nodes).array[:, 0]


def clusters(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return a batch of clusters as one graph, and the Morse energy of each."""
    grid = np.stack(np.meshgrid(*[[0.0, 1.1]] * 3), -1).reshape(-1, 3)[:ATOMS]
    positions = grid + 0.15 * rng.normal(size=(CLUSTERS, ATOMS, 3))
    species = rng.integers(2, size=(CLUSTERS, ATOMS))
    i, j = np.nonzero(~np.eye(ATOMS, dtype=bool))
    r = np.linalg.norm(positions[:, i] - positions[:, j], axis=-1)
    wanted = 1.0 + 0.3 * (species[:, i] == species[:, j])
    energy = 0.5 * np.sum((1 - np.exp(-2 * (r - wanted))) ** 2 - 1, axis=-1) / ATOMS
    edges = np.arange(CLUSTERS)[:, None] * ATOMS + np.stack([i, j])[:, None]
    senders, receivers = edges.reshape(2, -1)
    flat = np.float32(positions.reshape(-1, 3)), species.reshape(-1), senders, receivers
    return {"graph": flat, "energy": np.float32(energy)}


def problem() -> Problem:
    model = Network()

    def loss_fn(params, batch, key):
        energies = model.apply(params, *batch["graph"]).reshape(CLUSTERS, ATOMS).mean(axis=1)
        errors = energies.astype(jnp.float32) - batch["energy"].astype(jnp.float32)
        return jnp.mean(jnp.square(errors))

    def batches(steps: int) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        return (clusters(rng) for _ in range(steps))

    params = model.init(jax.random.key(0), *clusters(np.random.default_rng(1))["graph"])
    return Problem(loss_fn, params, batches, optax.adamw(1e-3))
