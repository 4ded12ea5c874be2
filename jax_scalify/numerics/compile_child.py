"""The process that compiles a program for a device that is not there; see `compiling`."""

import dataclasses
import json
import sys
import time
from pathlib import Path

from jax.experimental import topologies

from jax_scalify import _compat
from jax_scalify.numerics.compiling import memory_of
from jax_scalify.numerics.targets import Target


def main(folder: str) -> None:
    """Compile the module in a folder, and leave there what became of it."""
    path = Path(folder)
    job = json.loads((path / "job.json").read_text())
    target, options = Target(**job["target"]), job["options"]
    if target.platform == "tpu":
        description = topologies.get_topology_desc(target.topology, platform="tpu")
    else:
        description = topologies.get_topology_desc(
            "",
            platform=target.platform,
            target_config=target.description,
            topology=target.topology,
        )
    count = options["devices"]
    if len(description.devices) < count:
        sys.exit(f"{target.topology} has {len(description.devices)} devices, not {count}.")
    module = (path / "module").read_bytes()
    start = time.perf_counter(), time.process_time()
    compiled = _compat.compile_module(module, description.devices[:count], options)
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    (path / "program.hlo").write_text("\n\n".join(m.to_string() for m in compiled.hlo_modules()))
    memory = memory_of(compiled.get_compiled_memory_stats())
    result = {
        "devices": count,
        "seconds": seconds,
        "memory": memory and dataclasses.asdict(memory),
    }
    (path / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
