"""Which axis of which array lies along which axis of the mesh."""

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_scalify as jsa

PyTree = Any
# Sequences lie along the first two, which differ in the weights: `data` has copies of them, `fsdp`
# parts. `tensor` has parts of each layer, and between the layers parts of each sequence.
AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

_IN, _OUT = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
_SPECS = {
    "tokens": P("tensor", "fsdp"),
    "head": P("fsdp", "tensor"),
    **dict.fromkeys(("query", "key", "value", "gate", "up"), _IN),
    **dict.fromkeys(("out", "down"), _OUT),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, or None for one device, and how arrays lie on it."""

    mesh: Mesh | AbstractMesh | None

    def size(self, *names: str) -> int:
        """How many devices lie along some axes."""
        shape = self.mesh.shape if self.mesh is not None else {}
        return math.prod(shape.get(name, 1) for name in names)

    def sharding(self, *spec: Any) -> NamedSharding | None:
        """A sharding along axes of the mesh; names that it has not are left out."""
        if self.mesh is None:
            return None
        return NamedSharding(self.mesh, P(*map(self._present, spec)))

    def stream(self, x: jax.Array) -> jax.Array:
        """The residual stream, `(batch, time, width)`: its sequences are cut for `tensor`."""
        return self._constrained(x, BATCH, "tensor")

    def rows(self, x: jax.Array) -> jax.Array:
        """What a layer reads, `(batch, time, width)`: whole sequences."""
        return x if self.size("tensor") == 1 else self._constrained(x, BATCH)

    def heads(self, x: jax.Array) -> jax.Array:
        """Queries, keys, values, `(batch, time, heads, channels)`."""
        return x if self.size("tensor") == 1 else self._constrained(x, BATCH, None, "tensor")

    def shardings(self, tree: PyTree) -> PyTree:
        """Shardings of weights, and of an optimizer's state that is shaped like them."""
        is_scaled = lambda x: isinstance(x, jsa.ScaledArray)  # noqa: E731

        def of_leaf(path: tuple, leaf: Any) -> NamedSharding | None:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            spec = _SPECS.get(names[-1], P()) if names else P()
            return self.sharding(*spec)

        found = jax.tree_util.tree_map_with_path(of_leaf, tree, is_leaf=is_scaled)
        return jsa.tree.shardings(tree, found)

    def batch_sharding(self) -> NamedSharding | None:
        """Of tokens, `(batch, context + 1)`."""
        return self.sharding(BATCH)

    def _present(self, name: Any) -> Any:
        if isinstance(name, tuple):
            return tuple(n for n in name if n in self.mesh.shape) or None
        return name if name is None or name in self.mesh.shape else None

    def _constrained(self, x: jax.Array, *spec: Any) -> jax.Array:
        sharding = self.sharding(*spec)
        return x if sharding is None else lax.with_sharding_constraint(x, sharding)


def parse_mesh(text: str | None, devices: int | None) -> dict[str, int]:
    """Read `data=4,fsdp=2,tensor=1`: the number of devices along each axis.

    Args:
        text: axes that are not named are 1; None is `fsdp` over all devices.
        devices: how many there are; None if that is not known.

    Raises:
        ValueError: for another axis, a number that is not positive, or not as many devices.
    """
    if text is None:
        if devices is None:
            raise ValueError("`mesh` has to be given for this target, as in 'fsdp=128,tensor=8'.")
        text = f"fsdp={devices}"
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in AXES or not number.isdigit() or int(number) < 1:
            raise ValueError(
                f"`mesh` must be like 'data=4,fsdp=2,tensor=1' with axes of {', '.join(AXES)} and "
                f"positive numbers, got {part.strip()!r} in {text!r}."
            )
        sizes[name] = int(number)
    count = math.prod(sizes.values())
    if devices is not None and count != devices:
        raise ValueError(f"`mesh`: {text!r} is of {count} devices, and there are {devices}.")
    return sizes


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """A mesh of the devices of all processes."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh of devices that need not be there."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
