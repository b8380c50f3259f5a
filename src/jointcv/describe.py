"""What `fit` would do with a problem, in words, before anything runs."""

import dataclasses
from typing import Any

import jax

from jointcv.algorithm.natural import NaturalGradient
from jointcv.find import Found, find_view
from jointcv.noise import PaperNoise
from jointcv.plan import Plan, plan
from jointcv.problem import Problem
from jointcv.view import AbstractView, LinearView


@dataclasses.dataclass(frozen=True)
class Description:
    """What `fit` would do with a problem, readable before anything runs.

    Attributes:
        num_data: N.
        dim: D, the number of latent variables.
        view: what a datum sees, in words.
        num_predictors: K of a linear view; None of a whole one.
        reason: why the view is not a smaller one, or what was done so that it could be.
        noise: how ε enters.
        memory: what is remembered, and for which minibatches.
        table_bytes: what the memory takes.
        prior: how the part that is not subsampled is handled.
        steps: how parameters move.
    """

    num_data: int
    dim: int
    view: str
    num_predictors: int | None
    reason: str
    noise: str
    memory: str
    table_bytes: int
    prior: str
    steps: str

    def __str__(self):
        lines = [
            f"data        {self.num_data:,} rows, {self.dim:,} latent variables",
            f"view        {self.view}",
            f"noise       {self.noise}",
            f"memory      {self.memory}, {_in_bytes(self.table_bytes)}",
            f"prior       {self.prior}",
            f"steps       {self.steps}",
        ]
        return "\n".join(lines + ([f"why         {self.reason}"] if self.reason else []))


def describe(problem: Problem, **options: Any) -> Description:
    """What was found in a problem and what `fit` would choose for it.

    Args:
        problem: the model and its data.
        **options: those of `fit` that say what runs, from `control` to `memory_budget`.

    Examples:
        >>> print(jcv.describe(problem))  # doctest: +SKIP
        data        169,404 rows, 5,525 latent variables
        view        linear, K = 1 predictor a datum
        ...
    """
    found = Found(options["view"]) if options.get("view") is not None else None
    if found is None and not isinstance(options.get("noise"), PaperNoise):
        found = find_view(problem)
        options["view"] = found.view
    chosen = plan(problem, **options)
    view = chosen.objective.view
    return Description(
        num_data=problem.num_data,
        dim=problem.dim,
        view=_describe_view(view),
        num_predictors=view.num_predictors if isinstance(view, LinearView) else None,
        reason="" if found is None else found.reason,
        noise=repr(chosen.objective.noise),
        memory=f"{chosen.control.memory!r} with {chosen.sampler!r}",
        table_bytes=_memory_bytes(chosen),
        prior=type(chosen.objective.prior).__name__,
        steps=_describe_steps(chosen),
    )


def _memory_bytes(chosen: Plan) -> int:
    objective, control, sampler = chosen.objective, chosen.control, chosen.sampler
    table = jax.eval_shape(lambda: control.memory.init(objective, objective.init(jax.random.key(0)), sampler))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(table))


def _describe_view(view: AbstractView) -> str:
    if not isinstance(view, LinearView):
        return "the whole z (D numbers a datum)"
    predictors = f"linear, K = {view.num_predictors} predictor{'s' * (view.num_predictors > 1)} a datum"
    return predictors if view.has_squares else f"{predictors}; log σ is not controlled"


def _describe_steps(chosen: Plan) -> str:
    count = chosen.sampler.steps_per_epoch(chosen.objective.num_data)
    if isinstance(chosen.optimizer, NaturalGradient):
        kind = "natural gradient"
    else:
        kind = "Adam, decayed to zero" if chosen.optimizer is None else "the given optimiser"
    return f"{kind}, {count:,} an epoch"


def _in_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
