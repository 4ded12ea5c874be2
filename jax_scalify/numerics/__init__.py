"""Look at the numbers of a training step: scales, ranges, the first nan, FP8 matmuls, its cost."""

from jax_scalify.numerics.check_fp8 import Matmul, check_fp8
from jax_scalify.numerics.compile_report import CompileReport, compile_report
from jax_scalify.numerics.compiling import Memory
from jax_scalify.numerics.fp8_report import Fp8Report
from jax_scalify.numerics.guarding import Drift, Verdict
from jax_scalify.numerics.hlo_costs import Collective, Kernel
from jax_scalify.numerics.host_statistics import Fit, Measure
from jax_scalify.numerics.measuring import Measured
from jax_scalify.numerics.nonfinite import Nonfinite, find_nonfinite
from jax_scalify.numerics.plot import plot_histogram, plot_scales
from jax_scalify.numerics.report import Report, report
from jax_scalify.numerics.report_advice import suggest
from jax_scalify.numerics.rows import Row
from jax_scalify.numerics.tracking import Record, Tracker, track

__all__ = [
    "Collective",
    "CompileReport",
    "Drift",
    "Fit",
    "Fp8Report",
    "Kernel",
    "Matmul",
    "Measure",
    "Measured",
    "Memory",
    "Nonfinite",
    "Record",
    "Report",
    "Row",
    "Tracker",
    "Verdict",
    "check_fp8",
    "compile_report",
    "find_nonfinite",
    "plot_histogram",
    "plot_scales",
    "report",
    "suggest",
    "track",
]
