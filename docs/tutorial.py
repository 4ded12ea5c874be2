"""The code of docs/tutorial.md, cell by cell: an ordinary Flax script, taken to float16 and FP8.

python docs/tutorial.py     # every stage, with its loss: one to two minutes on two CPU cores
"""

# %% An ordinary script
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

STEPS, BATCH = 300, 256

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
images, labels = np.float32(images / 16)[order], np.int32(labels)[order]
held_out, images, labels = (images[:897], labels[:897]), images[897:], labels[897:]


class Classifier(nn.Module):
    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Dense(128, dtype=self.dtype)(x)
            x = nn.gelu(nn.LayerNorm(dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype, name="head")(x)


def make_loss(model):
    def loss_fn(params, images, labels):
        logits = model.apply(params, images).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss_fn


def make_step(loss_fn, optimizer):
    def step(params, opt_state, images, labels):
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def train(update, params, opt_state, first=0, last=STEPS):
    for i in range(first, last):
        batch = np.random.default_rng(i).integers(len(labels), size=BATCH)
        params, opt_state, loss = update(params, opt_state, images[batch], labels[batch])
        if not np.isfinite(float(loss)):
            print(f"loss {float(loss)} at step {i}")
            break
    return params, opt_state


loss_fn = make_loss(Classifier())
optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, STEPS), weight_decay=1e-2)
start = Classifier().init(jax.random.key(0), images[:1])

# %% Stage 0
update = jax.jit(make_step(loss_fn, optimizer))
params, opt_state = train(update, start, optimizer.init(start))
print(f"float32: {loss_fn(params, *held_out):.4f}")
in_float32 = params

# %% Stage 1
params = jax.tree.map(lambda x: x.astype(jnp.float16), start)
opt_state = optimizer.init(params)
loss_fn16 = make_loss(Classifier(jnp.float16))
naive_step = make_step(loss_fn16, optimizer)
train(jax.jit(naive_step), params, opt_state)

# %% Stage 1, why
import jax_scalify as jsa

batch = images[:BATCH], labels[:BATCH]
print(jsa.numerics.find_nonfinite(naive_step)(params, opt_state, *batch))

# %% Stage 1, another epsilon
patched = optax.adamw(optax.cosine_decay_schedule(3e-3, STEPS), weight_decay=1e-2, eps=1e-4)
trained, _ = train(jax.jit(make_step(loss_fn16, patched)), params, patched.init(params))
print(f"float16, eps=1e-4: {loss_fn16(trained, *held_out):.4f}")

# %% Stage 1, what is lost
seen = jsa.numerics.report(make_step(loss_fn, optimizer))(start, optimizer.init(start), *batch)
for row in seen.underflowing("float16", share=0.3):
    if "kernel" in row.name:
        print(f"{row.name}: {row.shares('float16')[0]:.0%} become 0")

# %% Stage 2
update = jax.jit(jsa.scalify(make_step(loss_fn, optimizer)))
params, opt_state = jsa.as_scaled_array((start, optimizer.init(start)), scale="rms")
params, opt_state = train(update, params, opt_state)
print(f"scalify, float32: {loss_fn(jsa.asarray(params), *held_out):.4f}")

difference = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), in_float32, jsa.asarray(params))
print(f"largest difference of a weight: {max(jax.tree.leaves(difference)):.1e}")


# %% Stage 3
def make_step(loss_fn, optimizer):
    def step(params, opt_state, images, labels):
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return jsa.optim.apply_updates(params, updates), opt_state, loss  # 3

    return step


def init(optimizer):
    params = jsa.as_scaled_array(start, scale="rms", dtype=jnp.float16)  # 1
    return params, jsa.as_scaled_array(optimizer.init(params))


def evaluate(name, loss_fn, params, opt_state):
    loss = jax.jit(jsa.scalify(loss_fn))(params, *held_out)
    size = sum(x.nbytes for x in jax.tree.leaves((params, opt_state)))
    count = sum(x.size for x in jax.tree.leaves(start))
    print(f"{name}: {float(loss):.4f}, {size / count:.2f} bytes per parameter")


wide = jsa.optim.low_precision(optimizer, jnp.float32)  # 2
update = jax.jit(jsa.scalify(make_step(loss_fn16, wide)))
evaluate("weights in float16", loss_fn16, *train(update, *init(wide)))

# %% Stage 4
narrow = jsa.optim.low_precision(optimizer)
update = jax.jit(jsa.scalify(make_step(loss_fn16, narrow)))
evaluate("moments in float16", loss_fn16, *train(update, *init(narrow)))

# %% Stage 5
loss_fn8 = jsa.fp8_matmuls(loss_fn16)
update = jax.jit(jsa.scalify(make_step(loss_fn8, narrow)))
evaluate("FP8 matmuls", loss_fn8, *train(update, *init(narrow)))
print(jsa.numerics.check_fp8(update, *init(narrow), *batch).summary)

# %% Stage 6
params, opt_state = train(update, *init(narrow), last=50)
params, opt_state = jsa.freeze_scales((params, opt_state))
params, opt_state = train(update, params, opt_state, first=50)
evaluate("scales frozen", loss_fn8, params, opt_state)

# %% How much is noise
plain_update = jax.jit(make_step(loss_fn, optimizer))
losses = []
for seed in range(5):
    other = Classifier().init(jax.random.key(seed), images[:1])
    params, _ = train(plain_update, other, optimizer.init(other))
    losses.append(float(loss_fn(params, *held_out)))
print(f"float32, seeds 0 to 4: {min(losses):.4f} to {max(losses):.4f}")
