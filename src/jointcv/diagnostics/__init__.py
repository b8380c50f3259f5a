"""What to look at after a run: where the noise of the gradient comes from, and whether the answer can be trusted."""

from jointcv.diagnostics.quadrature import quadrature_error as quadrature_error
from jointcv.diagnostics.variance import VarianceReport as VarianceReport
from jointcv.diagnostics.variance import variance_report as variance_report
