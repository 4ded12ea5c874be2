"""Trace a function, and compile it: here, or in another process for a device that is not there.

The compilers of GPUs and TPUs read their settings once, when a process first uses JAX, and with the
wrong ones they look for a device. A function is therefore traced and lowered where it is, with all
that it has captured, and its program is compiled in a child process of the settings that the target
needs: this one goes on as it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jax_scalify import _compat
from jax_scalify.conversions.nnx_objects import pure_call
from jax_scalify.numerics.interpreting import flat_function
from jax_scalify.numerics.targets import Target, missing_plugin, parse_target

CHILD = "jax_scalify.numerics.compile_child"


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a program asks one device for, in bytes.

    Attributes:
        temporary: while it runs.
        arguments, results: that it is given and returns.
        in_place: of the results, those that take the place of donated arguments.
    """

    temporary: int
    arguments: int
    results: int
    in_place: int


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program as a compiler left it.

    Attributes:
        text: in HLO.
        platform: "cpu", "cuda", "tpu".
        devices: how many it runs on.
        memory: of one device; None where the compiler does not say.
        seconds: that the compiler took.
        processor_seconds: of all its threads.
    """

    text: str
    platform: str
    devices: int
    memory: Memory | None
    seconds: float
    processor_seconds: float


def trace(fun: Callable, args: tuple, kwargs: dict[str, Any], caller: str) -> jax.stages.Traced:
    """Trace a function, jitted or not, or take what its `trace` method returned.

    Raises:
        TypeError: if `fun` is not callable or no longer traced, or an argument is no array.
    """
    if isinstance(fun, (jax.stages.Lowered, jax.stages.Compiled)):
        raise TypeError(
            f"`fun` must be a function or a `jax.stages.Traced`, got {type(fun).__name__}, which "
            "no longer holds what was traced: pass the function and its arguments."
        )
    if isinstance(fun, jax.stages.Traced):
        if args or kwargs:
            raise TypeError("`args` must be left out: `fun` has been traced with its arguments.")
        return fun
    if not callable(fun):
        raise TypeError(f"`fun` must be callable, got {type(fun).__name__}.")
    call = pure_call(fun, args, kwargs)
    if isinstance(call.fun, jax.stages.Wrapped):
        return call.fun.trace(*args, **kwargs)
    _check_arrays((call.args, call.kwargs), fun, caller)
    # Callables, strings and numbers, as an Equinox model has them, are static.
    flat, found = flat_function(call, lambda leaf: hasattr(leaf, "dtype"))
    return jax.jit(flat).trace(*(leaf for _, leaf in found))


def _check_arrays(arguments: Any, fun: Callable, caller: str) -> None:
    """Raise a `TypeError` for an argument that `jax.jit` has to be told is static."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        is_static = callable(leaf) or isinstance(leaf, (str, int, float, complex))
        if not (hasattr(leaf, "dtype") or is_static):
            name = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise TypeError(
                f"`{name}` is of type {type(leaf).__name__}, no array. Make it static: "
                f"`{caller}(jax.jit({getattr(fun, '__name__', 'fun')}, static_argnames=…), …)`."
            )


def find_target(name: str | None) -> Target | None:
    """The target of a name whose compiler is installed; None for the devices at hand.

    Raises:
        TypeError: if it is no string.
        ValueError: for a target that is not known.
        ModuleNotFoundError: if the target's compiler is not installed.
    """
    if name is None:
        return None
    target = parse_target(name)
    install = missing_plugin(target)
    if install is not None:
        raise ModuleNotFoundError(
            f"To compile for {name!r}, JAX's plugin for {target.platform} has to be installed: "
            f"`{install}`. No such device has to be there."
        )
    return target


def compile_traced(traced: jax.stages.Traced, target: Target | None) -> CompiledProgram:
    """Compile for the devices of the trace, or for a target that need not be there.

    Raises:
        ValueError: for a target of too few devices.
        RuntimeError: if its compiler fails.
    """
    if target is not None:
        return _compile_elsewhere(traced, target)
    with _compat.compile_with_names():
        lowered = traced.lower()
        start = time.perf_counter(), time.process_time()
        compiled = lowered.compile()
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    devices = _devices(compiled)
    platform = devices[0].platform if devices else jax.default_backend()
    memory = memory_of(compiled.memory_analysis())
    return CompiledProgram(compiled.as_text() or "", platform, len(devices) or 1, memory, *seconds)


def memory_of(stats: Any) -> Memory | None:
    """What a compiler's own statistics say; a list of them has one a device."""
    stats = stats[0] if isinstance(stats, (list, tuple)) else stats
    if stats is None:
        return None
    return Memory(
        temporary=stats.temp_size_in_bytes,
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes,
        in_place=stats.alias_size_in_bytes,
    )


def _devices(compiled: Any) -> list[Any]:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return list(dict.fromkeys(d for s in shardings for d in getattr(s, "device_set", ())))


def _compile_elsewhere(traced: jax.stages.Traced, target: Target) -> CompiledProgram:
    module, options = _compat.lowered_program(traced.lower(lowering_platforms=(target.platform,)))
    if target.devices is not None and options["devices"] > target.devices:
        raise ValueError(
            f"`target` {target.name!r} has {target.devices} of the {options['devices']} devices "
            f"that the function is sharded over: name more, as in "
            f"'{target.name.partition(':')[0]}:{options['devices']}'."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "module").write_bytes(module)
        job = {"target": dataclasses.asdict(target), "options": options}
        (path / "job.json").write_text(json.dumps(job))
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",  # a plugin does not look for its device then
            "XLA_FLAGS": target.flags,
            "TPU_SKIP_MDS_QUERY": "1",  # the machine is no TPU host
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is taken, so others may compile too
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [sys.executable, "-m", CHILD, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
            raise RuntimeError(f"The compiler for {target.name!r} failed:\n{tail}")
        found = json.loads((path / "result.json").read_text())
        memory = Memory(**found["memory"]) if found["memory"] else None
        text = (path / "program.hlo").read_text()
    return CompiledProgram(text, target.platform, found["devices"], memory, *found["seconds"])
