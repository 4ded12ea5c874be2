"""Where results and pages lie."""

import re
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def device_slug() -> str:
    """Return the name of the device, as it stands in the names of files."""
    return re.sub(r"[^\w.]+", "-", jax.devices()[0].device_kind)
