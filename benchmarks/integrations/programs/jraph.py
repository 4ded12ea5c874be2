"""jraph's `GraphNetwork` with softmax attention learns to classify graphs.

Padded batches of random graphs, Haiku MLPs as update functions and two rounds of message passing,
as in jraph's examples.
"""

from collections.abc import Iterator

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

from benchmarks.integrations.programs.training import Problem

GRAPHS, NODES, EDGES, WIDTH = 16, 8, 20, 32


def random_graphs(rng: np.random.Generator) -> tuple[jraph.GraphsTuple, np.ndarray]:
    """Return a padded batch, and of each graph whether its edges join like nodes."""
    graphs, labels = [], np.zeros(GRAPHS + 1, np.int32)
    for i in range(GRAPHS):
        n, e = rng.integers(3, NODES + 1), rng.integers(3, EDGES + 1)
        nodes, (senders, receivers) = rng.normal(size=(n, 4)), rng.integers(n, size=(2, e))
        edges = nodes[senders, :3] - nodes[receivers, 1:] + 0.1 * rng.normal(size=(e, 3))
        labels[i] = np.sum(nodes[senders, 0] * nodes[receivers, 0]) > 0
        sizes = np.array([n]), np.array([e])
        floats = [np.float32(x) for x in (nodes, edges, np.zeros((1, 1)))]
        graph = jraph.GraphsTuple(*floats[:2], receivers, senders, floats[2], *sizes)
        graphs.append(graph)
    total = GRAPHS * NODES + 1, GRAPHS * EDGES, GRAPHS + 1
    return jraph.pad_with_graphs(jraph.batch_np(graphs), *total), labels


def mlp(*arrays: jax.Array) -> jax.Array:
    hidden = hk.nets.MLP([WIDTH, WIDTH], activation=jax.nn.silu)(jnp.concatenate(arrays, axis=-1))
    return hk.LayerNorm(-1, True, True)(hidden)


def attention_logits(edges, sent, received, global_features) -> jax.Array:
    # What is the same for all edges of a node, as a bias, changes no softmax.
    return hk.Linear(1, with_bias=False)(jnp.concatenate([edges, sent], axis=-1))


def forward(graph: jraph.GraphsTuple) -> jax.Array:
    embed = jraph.GraphMapFeatures(hk.Linear(WIDTH), hk.Linear(WIDTH), hk.Linear(WIDTH))
    graph = embed(graph)
    for _ in range(2):
        network = jraph.GraphNetwork(
            update_edge_fn=mlp,
            update_node_fn=mlp,
            update_global_fn=mlp,
            attention_logit_fn=attention_logits,
            attention_reduce_fn=lambda edges, weights: edges * weights,
        )
        graph = network(graph)
    return hk.Linear(2, name="head")(graph.globals)


def problem() -> Problem:
    model = hk.without_apply_rng(hk.transform(forward))

    def loss_fn(params, batch, key):
        graph, labels = batch
        logits = model.apply(params, graph).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        mask = jraph.get_graph_padding_mask(graph)
        return jnp.sum(jnp.where(mask, losses, 0)) / jnp.sum(mask)

    def batches(steps: int) -> Iterator[tuple[jraph.GraphsTuple, np.ndarray]]:
        rng = np.random.default_rng(0)
        return (random_graphs(rng) for _ in range(steps))

    params = model.init(jax.random.key(0), random_graphs(np.random.default_rng(1))[0])
    return Problem(loss_fn, params, batches)
