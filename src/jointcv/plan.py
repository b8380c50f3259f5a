"""What is chosen where the user says nothing: view, noise, prior, memory, sampler and steps.

linear view, K = 1   quadrature, per-datum memory in η    (two numbers a datum)
linear view, K > 1   noise in η, per-datum memory in η    (K numbers a datum)
whole view           noise in z, fixed minibatches        (N/B locations) if they fit the budget, else an anchor
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from jointcv.algorithm.natural import NaturalGradient, suits
from jointcv.checks import check_count, check_type
from jointcv.control import AbstractControl, EnsembleCV, JointCV, SubsamplingCV
from jointcv.elbo import Elbo, fold_prior
from jointcv.family import ConstantStart, MeanField
from jointcv.find import find_view
from jointcv.memory import AbstractMemory, Anchor, PerBatch, PerDatum, Snapshots, WholeTable
from jointcv.noise import AbstractNoise, PaperNoise, ParameterNoise, PredictorNoise, Quadrature
from jointcv.prior import closed_prior, sampled_prior
from jointcv.problem import Problem
from jointcv.sampler import AbstractSampler, FixedBatches, Reshuffle
from jointcv.smoothness import propose_batch_size
from jointcv.view import AbstractView, LinearView, WholeView, WholeViewEach

MEMORY_BUDGET = 2**30

Optimizer = optax.GradientTransformation | NaturalGradient


class Plan(NamedTuple):
    """What a run is made of. Without an optimiser it is Adam, whose decay needs the length of the run."""

    objective: Elbo
    control: AbstractControl
    sampler: AbstractSampler
    optimizer: Optimizer | None


def plan(
    problem: Problem,
    *,
    optimizer: Optimizer | None = None,
    batch_size: int | Literal["auto"] | None = None,
    sampler: AbstractSampler | None = None,
    family: MeanField | None = None,
    **parts: Any,
) -> Plan:
    """What `fit` runs with these arguments, which are its own; `parts` are those of `assemble`.

    Raises:
        ValueError: where they do not go together.
    """
    check_type("problem", problem, Problem, "Pass jointcv.Problem(...).")
    check_type("optimizer", optimizer, Optimizer | None, "Use NaturalGradient(), optax.sgd(1e-3) or another.")
    if batch_size == "auto" and sampler is not None:
        raise ValueError(f"batch_size='auto' and sampler={sampler!r} disagree. Give one of them.")
    automatic = batch_size == "auto" or (batch_size is None and sampler is None)
    objective, control, sampler = assemble(
        problem.without_origin(),
        family=family,
        sampler=sampler,
        batch_size=None if automatic else batch_size,  # pyright: ignore
        **parts,
    )
    if optimizer is None and suits(objective, control):
        optimizer = NaturalGradient()
    if isinstance(optimizer, NaturalGradient) and isinstance(objective.view, LinearView):
        if family is None:  # zero is where the losses of linear predictors are most curved
            objective = dataclasses.replace(objective, family=MeanField(ConstantStart()))
        if automatic and isinstance(sampler, Reshuffle):
            sampler = Reshuffle(propose_batch_size(objective))
    return Plan(objective, control, sampler, optimizer)


def assemble(
    problem: Problem,
    *,
    control: AbstractControl | None = None,
    family: MeanField | None = None,
    sampler: AbstractSampler | None = None,
    batch_size: int | None = None,
    view: AbstractView | None = None,
    noise: AbstractNoise | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> tuple[Elbo, AbstractControl, AbstractSampler]:
    """Objective, control and sampler, each as given or chosen to fit the others.

    Raises:
        ValueError: where the given ones do not go together.
    """
    control = JointCV() if control is None else control
    check_type("problem", problem, Problem, "Pass jointcv.Problem(...).")
    check_type("control", control, AbstractControl, "Use JointCV(), MonteCarloCV(), NaiveGradient() …")
    check_type("family", family, MeanField | None, "Use MeanField().")
    check_type("sampler", sampler, AbstractSampler | None, "Use Reshuffle(100), FixedBatches(100) …")
    check_type("view", view, AbstractView | None, "Leave it out, or use WholeView(problem).")
    check_type("noise", noise, AbstractNoise | None, "Leave it out, or use ParameterNoise() …")
    if sampler is not None and batch_size is not None and batch_size != sampler.batch_size:
        raise ValueError(f"batch_size={batch_size} and sampler={sampler!r} disagree. Give one of them.")
    if isinstance(noise, PaperNoise):
        view = WholeView(fold_prior(problem)) if view is None else view
    view = find_view(problem).view if view is None else view
    _check_view(view, problem)
    if batch_size is not None:
        batch_size = check_count("batch_size", batch_size, "data")
    check_count("memory_budget", memory_budget, "bytes", least=0)
    if batch_size is not None:
        _check_batch_size(batch_size, problem.num_data)
        batch_size = min(batch_size, view.problem.num_data)  # a view may have set a few data apart
    if sampler is not None:
        _check_batch_size(sampler.batch_size, view.problem.num_data)
    if isinstance(control, JointCV) and control.memory is None:
        memory = _choose_memory(view, sampler, batch_size, noise, memory_budget)
        control = dataclasses.replace(control, memory=memory)
    memory: AbstractMemory = control.memory  # pyright: ignore
    if sampler is None:
        kind = FixedBatches if isinstance(memory, PerBatch) else Reshuffle
        sampler = kind(_default_batch_size(view.problem) if batch_size is None else batch_size)
    memory.check(sampler)
    if isinstance(view, WholeView) and isinstance(memory, PerDatum | Snapshots | WholeTable):
        view = WholeViewEach(view.problem)
    noise = _choose_noise(view, control) if noise is None else noise
    _check_noise(noise, view)
    _check_control(control, noise)
    read_prior = sampled_prior if isinstance(noise, ParameterNoise | PaperNoise) else closed_prior
    objective = Elbo(  # pyright: ignore
        problem=view.problem,
        family=family or MeanField(),
        view=view,
        noise=noise,
        prior=read_prior(view.problem),
    )
    return objective, control, sampler


def _choose_memory(view, sampler, batch_size, noise, budget: int) -> AbstractMemory:
    if isinstance(view, LinearView):
        return PerDatum() if sampler is None or sampler.visits_once else WholeTable()
    if sampler is not None and not isinstance(sampler, FixedBatches):
        return Anchor()
    num_data = view.problem.num_data
    size = sampler.batch_size if sampler is not None else batch_size or _default_batch_size(view.problem)
    num_bytes = -(-num_data // size) * view.problem.dim * view.problem.dtype.itemsize
    if isinstance(noise, PaperNoise):
        num_bytes *= 2  # σ^n too
    return PerBatch() if num_bytes <= budget else Anchor()


def _choose_noise(view, control) -> AbstractNoise:
    """The textbook estimators keep the textbook's noise; joint takes the best that the view allows."""
    if not isinstance(control, JointCV) or not isinstance(view, LinearView) or not view.has_squares:
        return ParameterNoise()
    return Quadrature() if view.num_predictors == 1 else PredictorNoise()


def _default_batch_size(problem: Problem) -> int:
    return min(100, problem.num_data)


def _check_view(view: AbstractView, problem: Problem) -> None:
    if view.problem.dim != problem.dim or view.problem.num_data > problem.num_data:
        raise ValueError(
            f"view={type(view).__name__}(...) shows another problem, of {view.problem.num_data} data and "
            f"{view.problem.dim} latent variables, not {problem.num_data} and {problem.dim}. Make it of this one."
        )
    if view.problem.num_data == problem.num_data and not _same_data(view.problem.data, problem.data):
        raise ValueError(
            f"view={type(view).__name__}(...) shows other data than problem's. Make it of this problem."
        )


def _same_data(one, other) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(left is right or np.array_equal(left, right) for left, right in pairs)


def _check_batch_size(batch_size: int, num_data: int) -> None:
    if batch_size > num_data:
        raise ValueError(f"batch_size={batch_size} is larger than the data (N = {num_data}). Use at most N.")


def _check_noise(noise: AbstractNoise, view: AbstractView) -> None:
    linear = isinstance(view, LinearView) and view.has_squares
    if isinstance(noise, PredictorNoise | Quadrature) and not linear:
        raise ValueError(
            f"noise={noise!r} acts on linear predictors, which this model does not show "
            "(see jointcv.describe(problem)). Use ParameterNoise()."
        )
    if isinstance(noise, Quadrature) and view.num_predictors != 1:  # pyright: ignore
        raise ValueError(
            f"noise={noise!r} needs one predictor a datum; this model has {view.num_predictors}. "  # pyright: ignore
            "Use PredictorNoise()."
        )
    if isinstance(noise, PaperNoise) and isinstance(view, LinearView):
        raise ValueError(
            "noise=PaperNoise() stores whole locations. Pass view=WholeView(fold_prior(problem))."
        )


def _check_control(control: AbstractControl, noise: AbstractNoise) -> None:
    if isinstance(control, SubsamplingCV | EnsembleCV) and isinstance(noise, PredictorNoise):
        raise ValueError(
            f"noise={noise!r} draws for the data of a batch; {type(control).__name__} needs one ε for all data. "
            "Use ParameterNoise()."
        )
