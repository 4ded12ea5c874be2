"""Variational Monte Carlo of the Ising chain with a restricted Boltzmann machine of netket.

The samples are drawn by netket's Metropolis sampler from the current state, inside the step; the
loss is the energy, whose gradient netket's `expect` estimates.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import netket as nk
import numpy as np
import optax

from benchmarks.integrations.programs.training import Problem

SITES, CHAINS = 10, 64


def problem() -> Problem:
    hilbert = nk.hilbert.Spin(s=0.5, N=SITES)
    hamiltonian = nk.operator.IsingJax(hilbert, nk.graph.Chain(SITES), h=1.0, dtype=np.float32)
    sampler = nk.sampler.MetropolisLocal(hilbert, n_chains=CHAINS, dtype=jnp.float32)
    model = nk.models.RBM(alpha=2, param_dtype=jnp.float32)
    params = model.init(jax.random.key(0), jnp.zeros((1, SITES), jnp.float32))

    def loss_fn(params, batch, key):
        state = sampler.init_state(model, params, seed=key)
        samples, _ = sampler.sample(model, params, state=state, chain_length=4)
        # The network computes in the dtype of its weights if the samples have it too.
        samples = samples.reshape(-1, SITES).astype(jax.tree.leaves(params)[0].dtype)
        samples = jax.lax.stop_gradient(samples)

        def log_pdf(params, samples):
            return 2 * model.apply(params, samples)

        def local_energy(params, samples):
            connected, elements = hamiltonian.get_conn_padded(samples)
            log_psi, log_connected = (model.apply(params, x) for x in (samples, connected))
            return jnp.sum(elements * jnp.exp(log_connected - log_psi[:, None]), axis=-1)

        return nk.jax.expect(log_pdf, local_energy, params, samples)[0]

    def batches(steps: int) -> Iterator[None]:
        return (None for _ in range(steps))

    return Problem(loss_fn, params, batches, optax.sgd(0.05))
