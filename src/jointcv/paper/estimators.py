"""The paper's estimators and ours: from a name to an algorithm, in one table at the end.

The paper's joint control keeps a location of z for every datum and corrects μ alone. Three forms of it:

    whole        the paper's own: (m_n, σ^n) for every datum, the prior in the table; small tasks
    predictors   the linear view: η_n = A_n m_n for every datum. The correction of μ is the same number for
                 number but for two things, the prior expanded at the current m and the current σ in v
    batches      one location for every fixed minibatch of a whole view; PPCA

In the last two `LocationOnly` leaves log σ its naive gradient, as the paper does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax.numpy as jnp
import optax

import jointcv as jcv


class LocationOnly(jcv.AbstractControl):
    """A control's correction of μ; log σ keeps its naive gradient."""

    control: jcv.AbstractControl

    @property
    def memory(self):
        return self.control.memory

    def correct(self, objective, recall, params, batch, draws):
        correction = self.control.correct(objective, recall, params, batch, draws)
        nothing = jnp.zeros((), params.log_scale.dtype)
        return eqx.tree_at(lambda c: (c.data.log_scale, c.rest.log_scale), correction, (nothing, nothing))


@dataclass(frozen=True)
class Setting:
    """What an estimator is built for.

    Args:
        problem: the model and its data.
        view: what was found that a datum sees of z.
        form: how the paper's estimators are written down for it.
        batch: data a step.
        optimizer: the learning rate's function.
        natural_batch: data a step of the natural gradient.
        naive_epochs: before a control with a memory sets in.
    """

    problem: jcv.Problem
    view: jcv.AbstractView
    form: "Form"
    batch: int
    optimizer: Callable[[float], optax.GradientTransformation]
    natural_batch: int
    naive_epochs: int = 1


@dataclass(frozen=True)
class Form:
    """How the paper's estimators are written down: view, noise, memory and sampler."""

    view: Callable[[Setting], jcv.AbstractView]
    noise: jcv.PaperNoise | jcv.ParameterNoise
    memory: jcv.AbstractMemory
    sampler: Callable[[int], jcv.AbstractSampler]


WHOLE = Form(
    lambda setting: jcv.WholeView(jcv.fold_prior(setting.problem)),
    jcv.PaperNoise(),
    jcv.PerDatum(),
    jcv.Reshuffle,
)
PREDICTORS = Form(lambda setting: setting.view, jcv.ParameterNoise(), jcv.PerDatum(), jcv.Reshuffle)
BATCHES = Form(lambda setting: setting.view, jcv.ParameterNoise(), jcv.PerBatch(), jcv.FixedBatches)


@dataclass(frozen=True)
class Estimator:
    """A row of the table.

    Args:
        build: from a setting to what runs.
        calls: gradients and Hessian products a step, for N data and batches of B; ∇f~ counts once, as
            its slope and Hessian product come from one pass.
        dial: what a sweep's values are put into.
        full_batch: whether a step sees all data.
    """

    build: Callable[[Setting], jcv.AbstractAlgorithm]
    calls: Callable[[int, int], float]
    dial: jcv.AbstractDial = jcv.LearningRate()
    full_batch: bool = False


def paper(control: Callable[[Form], jcv.AbstractControl], naive_epochs: int = 0, full_batch: bool = False):
    """An estimator of the paper, in the setting's form."""

    def build(setting: Setting) -> jcv.GradientDescent:
        form = setting.form
        chosen = control(form)
        sampler = _sampler(form, chosen, setting.batch, full_batch)
        chosen = chosen if form is WHOLE else LocationOnly(control=chosen)  # pyright: ignore
        view, noise = form.view(setting), form.noise
        objective, chosen, sampler = jcv.assemble(
            setting.problem, control=chosen, sampler=sampler, view=view, noise=noise
        )
        return _descent(setting, objective, chosen, sampler, naive_epochs)

    return build


def _sampler(form: Form, control: jcv.AbstractControl, batch: int, full_batch: bool) -> jcv.AbstractSampler:
    if full_batch:
        return jcv.FullBatch()
    return form.sampler(batch) if control.memory is form.memory else jcv.Reshuffle(batch)


def _descent(setting: Setting, objective, control, sampler, naive_epochs: int) -> jcv.GradientDescent:
    optimizer = optax.inject_hyperparams(setting.optimizer)(learning_rate=1e-3)
    naive_steps = naive_epochs * setting.naive_epochs * sampler.steps_per_epoch(objective.num_data)
    return jcv.GradientDescent(
        objective=objective, control=control, sampler=sampler, optimizer=optimizer, naive_steps=naive_steps
    )


def smiso(setting: Setting) -> jcv.Smiso:
    """SMISO with the naive gradient and parameters for every fixed minibatch."""
    sampler = jcv.FixedBatches(setting.batch)
    objective, _, _ = jcv.assemble(
        setting.problem,
        control=jcv.NaiveGradient(),
        sampler=sampler,
        view=setting.view,
        noise=jcv.ParameterNoise(),
    )
    return jcv.Smiso(objective, sampler, 1e-3, 0.9)


def ours(setting: Setting) -> jcv.GradientDescent:
    """Joint as the library has it by default: quadrature or noise in η, and log σ controlled."""
    objective, control, sampler = jcv.assemble(setting.problem, view=setting.view, batch_size=setting.batch)
    return _descent(setting, objective, control, sampler, 1)


def natural(setting: Setting) -> jcv.NaturalDescent:
    """The same with natural steps, whose size comes from theory."""
    objective, control, sampler = jcv.assemble(
        setting.problem, view=setting.view, batch_size=setting.natural_batch
    )
    return jcv.NaturalGradient().build(objective, control, sampler)


def evaluation(problem: jcv.Problem, view: jcv.AbstractView) -> jcv.Elbo:
    """The ELBO that all are judged by: exact in the data for one predictor, with noise in η for more."""
    return jcv.assemble(problem, view=view)[0]


ESTIMATORS: dict[str, Estimator] = {
    "naive": Estimator(paper(lambda form: jcv.NaiveGradient()), lambda n, b: b),
    "cv": Estimator(paper(lambda form: jcv.MonteCarloCV()), lambda n, b: 2 * b),
    "inc": Estimator(paper(lambda form: jcv.SubsamplingCV(), 1), lambda n, b: n + 2 * b),
    "ens": Estimator(paper(lambda form: jcv.EnsembleCV(), 1), lambda n, b: n + 3 * b),
    "joint": Estimator(paper(lambda form: jcv.JointCV(form.memory), 1), lambda n, b: 3 * b),
    "joint-svrg": Estimator(paper(lambda form: jcv.JointCV(jcv.Anchor()), 1), lambda n, b: 3 * b),
    "smiso": Estimator(smiso, lambda n, b: b, jcv.SurrogateRate()),
    "full-naive": Estimator(
        paper(lambda form: jcv.NaiveGradient(), full_batch=True), lambda n, b: n, full_batch=True
    ),
    "full-cv": Estimator(
        paper(lambda form: jcv.MonteCarloCV(), full_batch=True), lambda n, b: 2 * n, full_batch=True
    ),
    "ours": Estimator(ours, lambda n, b: 3 * b),
    "natural": Estimator(natural, lambda n, b: 3 * b, jcv.NoDial()),
}
