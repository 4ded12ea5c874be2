"""The devices that programs are compiled for without being there.

XLA's compiler for a GPU asks for a description of the device, that for a TPU for the name of a
topology. The figures of the GPUs are those that their makers publish and that XLA's own repository
has in `xla/backends/gpu/target_config/specs`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re

# Tuning measures kernels on the device; without Triton's matmuls cuBLAS is asked for them.
_GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
_GPU_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_TPU_NAME = re.compile(r"(?:tpu|v)\d+[\w ]*(?::\d+(?:x\d+){1,2})?")


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """What XLA is told of an NVIDIA GPU.

    Attributes:
        capability: major and minor compute capability.
        cores: streaming multiprocessors.
        shared: bytes of shared memory a core; a block may opt in to 1 KiB less.
        bandwidth: of the memory, in bytes a second.
        memory, l2_cache: in bytes.
        clock: in GHz.
        units: floating-point units a core.
        name: the driver's.
    """

    capability: tuple[int, int]
    cores: int
    shared: int
    bandwidth: int
    memory: int
    l2_cache: int
    clock: float
    units: int
    name: str


_GPUS = {
    "a100": _Gpu(
        capability=(8, 0),
        cores=108,
        shared=167_936,
        bandwidth=2_039_040_000_000,
        memory=85_100_068_864,
        l2_cache=41_943_040,
        clock=1.41,
        units=64,
        name="NVIDIA A100-SXM4-80GB",
    ),
    "h100": _Gpu(
        capability=(9, 0),
        cores=132,
        shared=233_472,
        bandwidth=3_352_320_000_000,
        memory=84_942_979_072,
        l2_cache=52_428_800,
        clock=1.98,
        units=128,
        name="NVIDIA H100 80GB HBM3",
    ),
    "h200": _Gpu(
        capability=(9, 0),
        cores=132,
        shared=233_472,
        bandwidth=4_800_000_000_000,
        memory=151_397_597_184,
        l2_cache=52_428_800,
        clock=1.98,
        units=128,
        name="NVIDIA H200 141GB HBM3e",
    ),
    "b200": _Gpu(
        capability=(10, 0),
        cores=148,
        shared=233_472,
        bandwidth=7_672_320_000_000,
        memory=191_514_411_008,
        l2_cache=132_644_864,
        clock=1.965,
        units=128,
        name="NVIDIA B200",
    ),
}
GPUS = tuple(_GPUS)


@dataclasses.dataclass(frozen=True)
class Target:
    """A device, or several, that a program is compiled for.

    Attributes:
        name: as the user wrote it.
        platform: "cuda" or "tpu".
        topology: what JAX calls the arrangement; of GPUs `slices x hosts x GPUs`.
        devices: how many there are; None of a TPU, whose chips may be several devices.
        description: of a GPU, as a `GpuTargetConfigProto` in text form; "" of a TPU.
        flags: `XLA_FLAGS` for the compiler.
    """

    name: str
    platform: str
    topology: str
    devices: int | None
    description: str = ""
    flags: str = ""


def parse_target(name: str) -> Target:
    """Read the name of a target.

    Raises:
        TypeError: if it is no string.
        ValueError: for a device that is not known, or a topology that cannot be read.

    Example:
        >>> parse_target("h100:8").topology, parse_target("v5p:2x2x4").platform
        ('1x1x8', 'tpu')
    """
    if not isinstance(name, str):
        raise TypeError(f"`target` must be a name such as 'h100:8', got {type(name).__name__}.")
    device, _, arrangement = name.partition(":")
    if device.lower() in _GPUS:
        found = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?([1-9]\d*)", arrangement or "1")
        if found is None:
            raise ValueError(
                f"`target` must be '{device}', '{device}:8', '{device}:HOSTSxGPUS' or "
                f"'{device}:SLICESxHOSTSxGPUS', got {name!r}."
            )
        sizes = [int(n or 1) for n in found.groups()]
        return Target(
            name=name,
            platform="cuda",
            topology="x".join(map(str, sizes)),
            devices=math.prod(sizes),
            description=_described(_GPUS[device.lower()]),
            flags=_GPU_FLAGS,
        )
    if not _TPU_NAME.fullmatch(name):
        raise ValueError(
            f"`target` must be one of {', '.join(_GPUS)}, each alone or with a number of devices "
            f"('h100:8'), or a TPU topology as JAX names it ('v5p:2x2x4', 'v6e:4x4', "
            f"'tpu7x:2x2x1'); got {name!r}."
        )
    # The smallest topology that there is of all kinds; a program of one device uses one of it.
    default = "2x2" if device.lower().endswith("e") else "2x2x1"
    topology = name if arrangement else f"{device}:{default}"
    return Target(name=name, platform="tpu", topology=topology, devices=None)


def missing_plugin(target: Target) -> str | None:
    """What has to be installed to compile for a target; None if it is there."""
    if target.platform == "tpu":
        return None if _is_installed("libtpu") else "pip install 'jax[tpu]'"
    if any(_is_installed(name) for name in _GPU_PLUGINS):
        return None
    return "pip install 'jax[cuda13]'"


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def _described(gpu: _Gpu) -> str:
    major, minor = gpu.capability
    device = {
        "cuda_compute_capability": f"{{ major: {major} minor: {minor} }}",
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_core": gpu.shared,
        "shared_memory_per_block_optin": gpu.shared - 1024,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.units,
        "block_dim_limit_x": 2_147_483_647,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "memory_bandwidth": gpu.bandwidth,
        "l2_cache_size": gpu.l2_cache,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": gpu.memory,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
    }
    fields = " ".join(
        f"{k} {v}" if str(v).startswith("{") else f"{k}: {v}" for k, v in device.items()
    )
    return (
        f'gpu_device_info {{ {fields} }} platform_name: "CUDA" '
        "dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 9 } "
        f'device_description_str: "{gpu.name}"'
    )
