"""Controls: zero-mean corrections of the gradient, each file opening with its equation."""

from jointcv.control.cv import MonteCarloCV as MonteCarloCV
from jointcv.control.ensemble import EnsembleCV as EnsembleCV
from jointcv.control.inc import SubsamplingCV as SubsamplingCV
from jointcv.control.interface import AbstractControl as AbstractControl
from jointcv.control.joint import JointCV as JointCV
from jointcv.control.none import NaiveGradient as NaiveGradient
