"""Look at the numbers of a training step: scales, ranges, the first nan, and FP8 matmuls."""

from jax_scalify.numerics.fp8 import Fp8Report, Matmul, check_fp8
from jax_scalify.numerics.measuring import Fit, Measure
from jax_scalify.numerics.report import Report, Row, report
from jax_scalify.numerics.tracking import Record, Tracker, track

__all__ = [
    "Fit",
    "Fp8Report",
    "Matmul",
    "Measure",
    "Record",
    "Report",
    "Row",
    "Tracker",
    "check_fp8",
    "report",
    "track",
]
