"""What is chosen where the user says nothing: view, noise, prior, memory and sampler; and a description of it.

linear view, K = 1   quadrature, per-datum memory in η    (two numbers a datum)
linear view, K > 1   noise in η, per-datum memory in η    (K numbers a datum)
whole view           noise in z, fixed minibatches        (N/B locations) if they fit the budget, else an anchor
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jointcv.checks import check_count, check_type
from jointcv.control import AbstractControl, EnsembleCV, JointCV, SubsamplingCV
from jointcv.elbo import Elbo, fold_prior
from jointcv.family import MeanField
from jointcv.linear import NoSplit, offenders, rows_vary, split, squares_hold, verify
from jointcv.memory import AbstractMemory, Anchor, PerBatch, PerDatum, Snapshots, WholeTable
from jointcv.noise import AbstractNoise, PaperNoise, ParameterNoise, PredictorNoise, Quadrature
from jointcv.prior import closed_prior, sampled_prior
from jointcv.problem import Problem
from jointcv.sampler import AbstractSampler, FixedBatches, Reshuffle
from jointcv.view import AbstractView, LinearView, WholeView, WholeViewEach

MEMORY_BUDGET = 2**30


class Found(eqx.Module):
    """What reading the model gave: a view and, in words, why it is not a better one."""

    view: AbstractView
    reason: str = eqx.field(static=True, default="")


def find_view(problem: Problem) -> Found:
    """The smallest view of the data that the model's jaxpr shows.

    A few data whose predictors collide (a player against himself) move out of the data into the part that is
    handled in full, so that the squared map holds for all that are left.
    """
    datum = jax.tree.map(lambda leaf: leaf[0], problem.data)
    position = jnp.zeros(problem.dim, problem.dtype)
    found = split(problem.likelihood_at, position, datum)
    if isinstance(found, NoSplit):
        return Found(WholeView(problem), found.reason)
    wrong = verify(found, problem.likelihood_at, position, problem.data, jax.random.key(0))
    if wrong is not None:
        return Found(WholeView(problem), f"a linear view was read but does not hold: {wrong}")
    same_rows = not rows_vary(found, datum)
    reason = squares_hold(found, position, problem.data)
    if reason is None:
        return Found(LinearView(problem, found, has_squares=True, same_rows=same_rows))
    few = np.asarray(offenders(found, position, problem.data))
    if 0 < few.sum() <= max(16, problem.num_data // 1000) and few.sum() < problem.num_data:
        return Found(LinearView(set_apart(problem, few), found, has_squares=True, same_rows=same_rows))
    return Found(LinearView(problem, found, has_squares=False), reason)


def set_apart(problem: Problem, few: np.ndarray) -> Problem:
    """The same posterior, with the few data of this mask in the part that is not subsampled."""
    apart = problem.take(np.flatnonzero(few))

    def log_prior(z):
        likelihoods = jax.vmap(problem.log_likelihood, (None, 0))(z, apart)
        return problem.log_prior(z) + jnp.sum(likelihoods)

    return Problem(
        log_prior=log_prior,
        log_likelihood=problem.log_likelihood,
        data=problem.take(np.flatnonzero(~few)),
        example=problem.example,
        constrain=problem.constrain,
    )


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
    if batch_size is not None:
        check_count("batch_size", batch_size, "data")
    _check_batch_size(batch_size if sampler is None else sampler.batch_size, view.problem.num_data)
    if isinstance(control, JointCV) and control.memory is None:
        memory = _choose_memory(view, sampler, batch_size, memory_budget)
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


def _choose_memory(view, sampler, batch_size, budget: int) -> AbstractMemory:
    if isinstance(view, LinearView):
        return PerDatum() if sampler is None or sampler.visits_once else WholeTable()
    if sampler is not None and not isinstance(sampler, FixedBatches):
        return Anchor()
    num_data = view.problem.num_data
    size = sampler.batch_size if sampler is not None else batch_size or _default_batch_size(view.problem)
    num_bytes = -(-num_data // size) * view.problem.dim * view.problem.dtype.itemsize
    return PerBatch() if num_bytes <= budget else Anchor()


def _choose_noise(view, control) -> AbstractNoise:
    """The textbook estimators keep the textbook's noise; joint takes the best that the view allows."""
    if not isinstance(control, JointCV) or not isinstance(view, LinearView) or not view.has_squares:
        return ParameterNoise()
    return Quadrature() if view.num_predictors == 1 else PredictorNoise()


def _default_batch_size(problem: Problem) -> int:
    return min(100, problem.num_data)


def _check_batch_size(batch_size: int | None, num_data: int) -> None:
    if batch_size is None:
        return
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


@dataclasses.dataclass(frozen=True)
class Description:
    """What `fit` would do with a problem, readable before anything runs."""

    num_data: int
    dim: int
    view: str
    num_predictors: int | None
    reason: str
    noise: str
    memory: str
    table_bytes: int
    prior: str

    def __str__(self):
        lines = [
            f"data        {self.num_data:,} rows, {self.dim:,} latent variables",
            f"view        {self.view}",
            f"noise       {self.noise}",
            f"memory      {self.memory}, {_in_bytes(self.table_bytes)}",
            f"prior       {self.prior}",
        ]
        return "\n".join(lines + ([f"why         {self.reason}"] if self.reason else []))


def describe(problem: Problem, **options: Any) -> Description:
    """What was found in a problem and what `fit` would choose for it, with the same options.

    Example:
        >>> print(jcv.describe(problem))  # doctest: +SKIP
        data        169,404 rows, 5,525 latent variables
        view        linear, K = 1 predictor a datum
        ...
    """
    found = find_view(problem)
    options.setdefault("view", found.view)
    objective, control, sampler = assemble(problem, **options)
    view = objective.view
    table = jax.eval_shape(lambda: control.memory.init(objective, objective.init(jax.random.key(0)), sampler))
    table_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(table))
    linear = isinstance(view, LinearView)
    return Description(
        num_data=problem.num_data,
        dim=problem.dim,
        view=_describe_view(view),
        num_predictors=view.num_predictors if linear else None,
        reason=found.reason,
        noise=repr(objective.noise),
        memory=f"{control.memory!r} with {sampler!r}",
        table_bytes=table_bytes,
        prior=type(objective.prior).__name__,
    )


def _describe_view(view: AbstractView) -> str:
    if not isinstance(view, LinearView):
        return "the whole z (D numbers a datum)"
    predictors = f"linear, K = {view.num_predictors} predictor{'s' * (view.num_predictors > 1)} a datum"
    return predictors if view.has_squares else f"{predictors}; log σ is not controlled"


def _in_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
