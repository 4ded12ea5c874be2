"""What the name of an equation tells: the user's scopes, and the pass."""

from __future__ import annotations

import re

_TRANSFORMS = re.compile(r"\b(?:transpose|jvp|vmap|linearize|pmap)\(([^()]*)\)")
# What JAX and XLA write into names for calls, loops and branches; not for scopes of the user's.
_PLUMBING = re.compile(
    r"jit\(.*\)|pjit|while|body|cond|branch_\d+_fun|closed_call|core_call|eval_jaxpr|checkpoint"
    r"|remat2?|rematted_computation|custom_[jv][vj]p_call\w*|shard_map|body_pred"
)


def clean_name(path: str) -> str:
    """Return the user's scopes in an `op_name`.

    Example:
        >>> clean_name("jit(update)/transpose(jvp(GPT))/block_0/while/body/out/dot_general")
        'GPT/block_0/out'
    """
    parts = scopes(path)[:-1]
    for n in range(len(parts) // 2, 0, -1):  # remat writes the outer scopes twice
        if parts[:n] == parts[n : 2 * n]:
            return "/".join(parts[n:])
    return "/".join(parts)


def scopes(path: str) -> list[str]:
    """The user's scopes, and the primitive, in an `op_name`."""
    before = None
    while before != path:
        before, path = path, _TRANSFORMS.sub(r"\1", path)
    return [part for part in path.split("/") if part and not _PLUMBING.fullmatch(part)]


def phase_of(path: str) -> str:
    """Return "forward", "backward" or "recompute" for an `op_name`."""
    if "rematted_computation" in path:
        return "recompute"
    return "backward" if "transpose(" in path else "forward"
