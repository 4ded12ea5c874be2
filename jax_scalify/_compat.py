"""The one room for what differs between JAX versions and for JAX internals."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import (
    compiler,
    config,  # pyright: ignore[reportPrivateImportUsage]
    core,
    dispatch,
    source_info_util,
)
from jax._src.interpreters import mlir, pxla
from jax._src.interpreters.partial_eval import (
    DynamicJaxprTrace,
    DynamicJaxprTracer,
    convert_constvars_jaxpr,
    dce_jaxpr,
)
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.sharding_impls import UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]
from jax.core import Tracer
from jax.extend import core as jex_core

# Error messages and profiles name the user's line, not the interpreter's.
source_info_util.register_exclusion(os.path.dirname(__file__))

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


def is_traced(value: Any) -> bool:
    """Return whether a value is known only to a trace."""
    return isinstance(value, Tracer)


def is_of_one_trace(*values: Any) -> bool:
    """Return whether values are known to the same trace, or all to none."""
    return len({v._trace if is_traced(v) else None for v in values}) == 1


@contextlib.contextmanager
def equation_context(eqn: jex_core.JaxprEqn) -> Iterator[None]:
    """Re-enter an equation's name stack, source line and tracing context.

    Profiles, XLA metadata and error messages then name the user's code, not ours.
    """
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    _entered.equations = (*enclosing(), eqn)
    try:
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack),
            eqn.ctx.manager,
        ):
            yield
    finally:
        _entered.equations = enclosing()[:-1]


_entered = threading.local()


def enclosing() -> tuple[jex_core.JaxprEqn, ...]:
    """Return the equations that are interpreted now, outermost first."""
    return getattr(_entered, "equations", ())


def source_line(eqn: jex_core.JaxprEqn) -> str:
    """Return `file:line (function)` of the user's code that an equation comes from.

    An equation of a library function that JAX had traced before names no line of the user's; the
    call of that function does, or, of a library function that was itself scalified, this call.
    """
    for candidate in (eqn, *reversed(enclosing())):
        line = source_info_util.summarize(candidate.source_info)
        if line:
            return line
    return calling_line() or "an unknown line"


_LAYERS = tuple(f"{os.sep}{n}{os.sep}" for n in "flax equinox haiku keras penzai optax".split())


def own_line(*equations: jex_core.JaxprEqn) -> str:
    """Return `file:line (function)` of the model, above the library that its layers come from.

    The first equation that names one counts. An equation of a library function that JAX had traced
    before names none; the call of that function does. Empty if no equation names one.
    """
    tracebacks = (eqn.source_info.traceback for eqn in equations)
    frames = (f for t in tracebacks for f in source_info_util.user_frames(t))
    own = next((f for f in frames if not any(name in f.file_name for name in _LAYERS)), None)
    return f"{own.file_name}:{own.start_line} ({own.function_name})" if own else ""


def calling_line() -> str:
    """Return `file:line (function)` of the user's code that runs, above libraries."""
    frame = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if source_info_util.is_user_filename(file) and not any(n in file for n in _LAYERS):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def is_called_by(eqn: jex_core.JaxprEqn, library: str, function: str) -> bool:
    """Return whether a function of a library computes an equation."""
    return any(
        os.sep + library + os.sep in frame.file_name and function in frame.function_name.split(".")
        for frame in source_info_util.user_frames(eqn.source_info.traceback)
    )


def layer_line(eqn: jex_core.JaxprEqn) -> str:
    """Return the line of the model, or the best that is known, that an equation comes from."""
    return own_line(eqn) or source_line(eqn)


def name_stack(eqn: jex_core.JaxprEqn) -> str:
    """Return the scopes and transforms of an equation: `transpose(jvp(GPT))/block_0`."""
    return str(eqn.source_info.name_stack)


def is_forward_pass() -> bool:
    """Return whether the current equation is of a forward pass that has a backward pass.

    What it lies in counts: inside of a loop or `shard_map` names begin anew.
    """
    path = "/".join(map(name_stack, enclosing()))
    return "jvp(" in path and "transpose(" not in path


@contextlib.contextmanager
def compile_with_names() -> Iterator[None]:
    """Keep XLA's persistent cache from returning a program in which things have other names."""
    with config.compilation_cache_include_metadata_in_key(True):
        yield


def lowered_program(lowered: Any) -> tuple[bytes, dict[str, Any]]:
    """What another process needs to compile a lowered function: the module, and options."""
    lowering = lowered._lowering
    args = lowering.compile_args
    inputs, outputs = pxla.get_prop_to_input_output(
        args["in_shardings"], args["out_shardings"], len(args["ordered_effects"])
    )
    options = dict(devices=args["num_devices"], tuple_args=args["tuple_args"])
    options |= dict(propagates_to_inputs=list(inputs), propagates_to_outputs=list(outputs))
    file = io.BytesIO()
    lowering.stablehlo().operation.write_bytecode(file)
    return file.getvalue(), options


def compile_module(module: bytes, devices: Sequence[Any], options: dict[str, Any]) -> Any:
    """Compile what `lowered_program` returned, for devices that need not be there."""
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        settings = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.array(devices, object).reshape(1, -1),
            backend=devices[0].client,
        )
        settings.parameter_is_tupled_arguments = options["tuple_args"]
        build = settings.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = options["propagates_to_inputs"]
        build.allow_spmd_sharding_propagation_to_output = options["propagates_to_outputs"]
        executable_devices = xla_client.DeviceList(tuple(devices))
        return compiler.backend_compile_and_load(
            devices[0].client, parsed, executable_devices, settings, []
        )


def weakly_typed(x: jax.Array) -> jax.Array:
    """Return an array of the same dtype, weakly typed, as JAX makes it of a Python number."""
    return lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def kept_apart(product: Any) -> Any:
    """Keep XLA from making one constant of two that data is multiplied by: it might be infinite.

    The compiler of JAX 0.10 does not know that a nan may as well be chosen from one array.
    """
    if keeps_barriers():
        return lax.optimization_barrier(product)
    return lax.select(lax.eq(product, product), product, jnp.full_like(product, jnp.nan))


def close_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Give a jaxpr its constants; `ClosedJaxpr` is an alias of `Jaxpr` since JAX 0.12."""
    return jex_core.ClosedJaxpr(jaxpr, consts)  # pyright: ignore[reportPrivateImportUsage]


def open_jaxpr(closed: Any) -> Any:
    """Turn the constants of a closed jaxpr into its first arguments."""
    return convert_constvars_jaxpr(closed if isinstance(closed, jex_core.Jaxpr) else closed.jaxpr)


def live_jaxpr(closed: Any) -> jex_core.Jaxpr:
    """Return a jaxpr without the equations, here and in calls and loops, that no result needs."""
    jaxpr = getattr(closed, "jaxpr", closed)
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def live_closed_jaxpr(closed: Any) -> Any:
    """Return a closed jaxpr, with all of its operands, without the equations that nothing needs."""
    live = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), True)[0]
    return close_jaxpr(live, closed.consts)


def is_staging() -> bool:
    """Return whether what is computed now becomes an equation of a jaxpr."""
    return isinstance(core.trace_ctx.trace, DynamicJaxprTrace)


def inlined(closed: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluate a closed jaxpr. Into a trace its equations are copied: to bind them takes longer."""
    trace, here = core.trace_ctx.trace, source_info_util.current()
    has_effects = any(eqn.effects for eqn in closed.jaxpr.eqns)  # also those on local references
    if not isinstance(trace, DynamicJaxprTrace) or has_effects or closed.is_high:
        return jex_core.jaxpr_as_fun(closed)(*arrays)
    jaxpr = closed.jaxpr
    tracers = [trace.to_jaxpr_tracer(x, here) for x in (*closed.consts, *arrays)]
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), tracers, strict=True))

    def read(atom: Any) -> Any:
        is_var = not isinstance(atom, jex_core.Literal)
        return known[atom] if is_var else DynamicJaxprTracer(trace, atom.aval, atom, here)

    for eqn in jaxpr.eqns:
        source = eqn.source_info.replace(name_stack=here.name_stack + eqn.source_info.name_stack)
        operands, types = [read(v) for v in eqn.invars], [v.aval for v in eqn.outvars]
        out = trace.emit_eqn(operands, types, eqn.primitive, eqn.params, set(), source, eqn.ctx)
        known.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def keeps_barriers() -> bool:
    """Return whether XLA fuses nothing across barriers; that of JAX 0.10 drops them on the CPU."""
    return JAX_VERSION >= (0, 11)


def replace_equations(closed: Any, equations: Sequence[Any], count: int) -> Any:
    """Return a closed jaxpr with other equations and the first `count` of its results."""
    jaxpr = closed.jaxpr
    outvars = list(jaxpr.outvars[:count])
    return close_jaxpr(jaxpr.replace(eqns=list(equations), outvars=outvars), closed.consts)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carries of a scan."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def bind_longer_jit(eqn: jex_core.JaxprEqn, closed: Any, args: Sequence[Any]) -> list[Any]:
    """Call what an equation of `jit` called, with more results; those it had keep shardings."""
    params, consts = eqn.params, list(closed.consts)
    more = len(closed.jaxpr.outvars) - len(eqn.outvars)
    extended = {
        "jaxpr": close_jaxpr(open_jaxpr(closed), ()),
        "in_shardings": (UNSPECIFIED,) * len(consts) + tuple(params["in_shardings"]),
        "in_layouts": (None,) * len(consts) + tuple(params["in_layouts"]),
        "donated_invars": (False,) * (len(consts) + len(args)),
        "out_shardings": tuple(params["out_shardings"]) + (UNSPECIFIED,) * more,
        "out_layouts": tuple(params["out_layouts"]) + (None,) * more,
    }
    return eqn.primitive.bind(*consts, *args, **{**params, **extended})


def einsum(dot_general: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """`jax.numpy.einsum` by another `dot_general`."""
    return jnp.einsum(*args, _dot_general=dot_general, **kwargs)


def lower_with_devices(primitive: jex_core.Primitive) -> None:
    """Lower a primitive for known devices: `jax.nn.scaled_matmul`'s sharding asks for them."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def no_name_stack() -> Any:
    """Trace a body that several calls share: names of the first caller do not belong to it."""
    return source_info_util.reset_name_stack()


def expanded_jaxpr(prim: Any) -> Any:
    """The closed jaxpr of a `call_hi_primitive`, on its flat operands, one level expanded."""

    def expanded(*flat: Any) -> list[Any]:
        return jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, flat)))

    return jax.make_jaxpr(expanded)(*prim.in_avals_flat)


def derivative_rule(eqn: jex_core.JaxprEqn) -> str | None:
    """Tell which derivative an equation has been given by the user: "jvp", "vjp" or None."""
    prim = eqn.params.get("_prim")
    name = eqn.primitive.name if prim is None else type(prim).__name__
    if name in ("custom_jvp_call", "custom_linear_solve", "CustomJVPTraced"):
        return "jvp"
    if name in ("custom_vjp_call", "CustomVJPTraced"):
        return "vjp"
    return None


def hi_jaxprs(params: dict[str, Any]) -> list[Any]:
    """The jaxprs inside a `call_hi_primitive`."""
    prim = params.get("_prim")
    if prim is None:
        return []
    found = [getattr(prim.params.get("traced"), "jaxpr", None), prim.params.get("jaxpr")]
    return [j for j in found if j is not None]


def varying_axes(x: Any) -> frozenset[Any]:
    """The axes of a mesh along which an array or type is known to differ, inside `shard_map`."""
    kind = x if hasattr(x, "manual_axis_type") else jax.typeof(x)
    return frozenset(kind.manual_axis_type.varying)


def as_varying(x: Any, axes: frozenset[Any]) -> Any:
    """An array as one that may differ along more axes of a mesh, as others in a `shard_map` do."""
    missing = axes - varying_axes(x) if axes else axes
    return lax.pcast(x, tuple(sorted(missing, key=str)), to="varying") if missing else x


def varying_struct(shape: Any, dtype: Any, sharding: Any, axes: frozenset[Any]) -> Any:
    """The shape and dtype of an array that differs along some axes of a mesh."""
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    if sharding is None:
        mesh = jax.sharding.get_abstract_mesh()
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    manual = jax.sharding.ManualAxisType(varying=axes)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=manual)


def resharded(x: Any, mesh: Any, spec: Any) -> Any:
    """An array with a sharding that is a part of its type, on a mesh with explicit axes."""
    if jax.sharding.AxisType.Explicit not in (mesh.axis_types or ()):
        return x
    current = getattr(jax.typeof(x).sharding, "spec", None)
    padded = (*spec, *[None] * (x.ndim - len(spec)))
    if current is not None and (*current, *[None] * (x.ndim - len(current))) == padded:
        return x
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))


def _spec(x: Any) -> Any:
    kind = jax.typeof(x) if isinstance(x, jax.Array) else x
    return getattr(getattr(kind, "sharding", None), "spec", None)


def _unreduced(x: Any) -> frozenset[Any]:
    return getattr(_spec(x), "unreduced", frozenset())


def is_partial_sum(x: Any) -> bool:
    """Return whether the type of an array says that devices have yet to add it up."""
    return bool(_unreduced(x))


def for_partial_sums(number: Any, data: Any) -> Any:
    """A number that data may be multiplied by which devices have yet to add up.

    Types say so on a mesh of explicit axes (`P(unreduced=...)`, in its backward pass `reduced`),
    and a factor that all devices have is one whose own gradient is `reduced`, and the other way.
    """
    axes = _unreduced(data) or getattr(_spec(data), "reduced", frozenset())
    if not axes:
        return number
    own = jax.typeof(number).sharding.spec
    return jax.sharding.reshard(number, jax.sharding.PartitionSpec(*own, reduced=axes))


def explicit_sharding(like: Any) -> Any:
    """The sharding that is part of a type, on a mesh with explicit axes; else None."""
    sharding = getattr(like, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    explicit = mesh is not None and jax.sharding.AxisType.Explicit in (mesh.axis_types or ())
    return sharding if explicit else None
