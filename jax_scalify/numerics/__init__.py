"""Look at the numbers of a training step: scales, ranges, the first nan, and FP8 matmuls."""

from jax_scalify.numerics.check_fp8 import Matmul, check_fp8
from jax_scalify.numerics.fp8_report import Fp8Report
from jax_scalify.numerics.host_statistics import Fit, Measure
from jax_scalify.numerics.nonfinite import Nonfinite, find_nonfinite
from jax_scalify.numerics.plot import plot_histogram, plot_scales
from jax_scalify.numerics.report import Report, report
from jax_scalify.numerics.report_advice import suggest
from jax_scalify.numerics.rows import Row
from jax_scalify.numerics.tracking import Record, Tracker, track

__all__ = [
    "Fit",
    "Fp8Report",
    "Matmul",
    "Measure",
    "Nonfinite",
    "Record",
    "Report",
    "Row",
    "Tracker",
    "check_fp8",
    "find_nonfinite",
    "plot_histogram",
    "plot_scales",
    "report",
    "suggest",
    "track",
]
