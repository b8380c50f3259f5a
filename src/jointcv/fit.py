"""fit(): a problem in, an approximate posterior out; and Fit, what a run has to say."""

import dataclasses
import math
import time
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import Array, Key, PyTree
from tqdm.auto import tqdm

from jointcv.algorithm.gradient import GradientDescent
from jointcv.algorithm.interface import AbstractAlgorithm
from jointcv.algorithm.natural import NaturalGradient
from jointcv.arviz import to_arviz
from jointcv.checks import check_count, check_key, check_type
from jointcv.control import AbstractControl
from jointcv.elbo import Elbo
from jointcv.evaluate import Estimate, full_value
from jointcv.family import MeanField
from jointcv.loop import Run, plan_chunks, result, run_chunk, start
from jointcv.memory import NoMemory
from jointcv.noise import AbstractNoise
from jointcv.plan import MEMORY_BUDGET, plan
from jointcv.problem import Problem
from jointcv.sampler import AbstractSampler
from jointcv.view import AbstractView

CHUNK_SIZE = 1000


class Fit(eqx.Module):
    """A finished run.

    Attributes:
        algorithm: what ran, with the objective and so the problem in it.
        run: where it stands; `extend` goes on from there.
        params: the parameters w that it ended with.
        history: NumPy arrays over the steps: `loss` (the step's estimate of the objective) and `gradient_norm`; of
            natural steps also `epoch_elbo` (on the full data, as the epoch began), `rate` (the median over the
            coordinates), `halvings` (epochs taken back), `corrected` (coordinates whose curvature was not
            positive) and `drift` (of the running mean, relative). With `elbo_every` also `elbo_step`, `elbo` and
            `elbo_standard_error`.
        status: "completed", or "diverged at step k": then the parameters are those before that step.
        seconds: of the loop, compilation included.
        source: the problem as `fit` was given it; the algorithm's may have a few data set apart.
    """

    algorithm: AbstractAlgorithm
    run: Run
    params: Any
    history: dict[str, np.ndarray]
    status: str = eqx.field(static=True)
    seconds: float = eqx.field(static=True)
    source: Problem | None = None

    @property
    def diverged(self) -> bool:
        return not bool(self.run.alive)

    @property
    def problem(self) -> Problem:
        return _elbo(self.algorithm).problem if self.source is None else self.source

    def sample(self, key: Key[Array, ""], num_draws: int = 1000) -> PyTree[Array]:
        """Draws of z from the approximate posterior, as the problem's `constrain` shows them; draws lead."""
        check_key(key)
        num_draws = check_count("num_draws", num_draws, "draws")
        positions = _positions(_elbo(self.algorithm).family, self.params, key, num_draws)
        return _constrain(self.problem.without_origin(), positions)

    def predictive(self, key: Key[Array, ""], num_draws: int = 1000) -> dict[str, Array]:
        """Draws of the observed sites of a NumPyro model from the posterior predictive, for all data; draws lead."""
        if self.problem.origin is None:
            raise ValueError(
                "This problem has a log likelihood but no way to draw data. Make it of a NumPyro model with "
                "jointcv.from_numpyro, or draw from fit.sample(key) yourself."
            )
        check_key(key)
        sample_key, data_key = jax.random.split(key)
        return self.problem.origin.predictive(data_key, self.sample(sample_key, num_draws))

    def to_arviz(
        self,
        key: Key[Array, ""] | None = None,
        *,
        num_draws: int = 1000,
        log_likelihood: bool = False,
        chunk_size: int | None = None,
    ) -> Any:
        """Posterior draws and observed data for ArviZ: `InferenceData` of ArviZ 0.2x, a `DataTree` of 1.x.

        Args:
            key: of the draws; those of `sample` with the same key, and of `jax.random.key(0)` by default.
            num_draws: how many.
            log_likelihood: whether to add the log likelihood of every datum, for PSIS-LOO: `num_draws` × N numbers.
            chunk_size: how many data at once; about two million values by default.
        """
        key = jax.random.key(0) if key is None else key
        check_key(key)
        num_draws = check_count("num_draws", num_draws, "draws")
        if chunk_size is not None:
            chunk_size = check_count("chunk_size", chunk_size, "data")
        positions = _positions(_elbo(self.algorithm).family, self.params, key, num_draws)
        samples = _constrain(self.problem.without_origin(), positions)
        return to_arviz(
            self.problem, positions, samples, log_likelihood=log_likelihood, chunk_size=chunk_size
        )

    def mean(self) -> PyTree[Array]:
        """The posterior mean of the unconstrained z, in the structure of the problem's example."""
        return self.problem.unravel(self.params.location)

    def standard_deviation(self) -> PyTree[Array]:
        """The posterior standard deviation of the unconstrained z, in the structure of the problem's example."""
        return self.problem.unravel(self.params.scale)

    def elbo(self, key: Key[Array, ""], *, num_draws: int = 100, chunk_size: int | None = None) -> Estimate:
        """The ELBO on the full data with its standard error over draws.

        Args:
            key: of the draws.
            num_draws: how many. With quadrature the data need none and a closed prior neither.
            chunk_size: how many data at once.
        """
        value = full_value(
            self.algorithm.objective, self.params, key, num_draws=num_draws, chunk_size=chunk_size
        )
        return Estimate(-value.value, value.standard_error)

    def extend(
        self, *, num_epochs: int | float | None = None, num_steps: int | None = None, **options: Any
    ) -> "Fit":
        """The same run, so many epochs or steps longer; the result is that of one longer run.

        A step that decays over the run goes on decaying: that of `fit`'s own Adam is zero by the end of its run.
        """
        steps_per_epoch = _steps_per_epoch(self.algorithm)
        more = _num_steps(num_epochs, num_steps, steps_per_epoch)
        run = jax.tree.map(lambda leaf: leaf.copy(), self.run)
        longer = _continue(self.algorithm, run, self.history, self.seconds, more, **options)
        return dataclasses.replace(longer, source=self.source)


@eqx.filter_jit
def _positions(family: MeanField, params, key, num_draws: int):
    """Draws of the flat z."""
    return jax.vmap(lambda key: family.sample(key, params))(jax.random.split(key, num_draws))


@eqx.filter_jit
def _constrain(problem: Problem, positions):
    return jax.vmap(lambda position: problem.constrain(problem.unravel(position)))(positions)


def fit(
    problem: Problem | AbstractAlgorithm,
    *,
    key: Key[Array, ""],
    control: AbstractControl | None = None,
    family: MeanField | None = None,
    optimizer: optax.GradientTransformation | NaturalGradient | None = None,
    batch_size: int | Literal["auto"] | None = None,
    num_epochs: int | float | None = None,
    num_steps: int | None = None,
    sampler: AbstractSampler | None = None,
    view: AbstractView | None = None,
    noise: AbstractNoise | None = None,
    naive_epochs: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool = False,
    chunk_size: int = CHUNK_SIZE,
    elbo_every: int | None = None,
    elbo_draws: int = 100,
) -> Fit:
    """Fit an approximate posterior.

    Args:
        problem: the model and its data; or an algorithm, assembled by hand, which then holds all that
            `control` … `memory_budget` would say.
        key: a JAX key; the same key gives the same result.
        control: the control variate; `JointCV()` by default.
        family: the approximating family and its start; by default `MeanField()`, begun at zero by natural steps.
        optimizer: an optax transformation, or `NaturalGradient()`. By default natural steps where the model shows a
            linear view and the control has a memory; Adam with a cosine decay to zero elsewhere.
        batch_size: data a step. By default, and where it is "auto", what the curvature of the problem suggests for
            natural steps; 100 for an optimiser.
        num_epochs: how long to run; 30 epochs by default.
        num_steps: how long to run, in steps. Give one of the two.
        sampler: how minibatches are drawn; reshuffled every epoch by default.
        view: what a datum sees of z; found by reading the model by default.
        noise: how ε enters; the best that the view allows by default.
        naive_epochs: epochs before the control sets in; 1 for a control with a memory, as in the paper.
        memory_budget: bytes that a table under a whole view may take before an anchor replaces it.
        progress: whether to show a progress bar.
        chunk_size: steps between two visits of the host; it does not change the result.
        elbo_every: epochs between evaluations of the full-data ELBO, recorded in the history.
        elbo_draws: draws of each such evaluation.

    Returns:
        The run: `params`, `sample`, `elbo`, `history`, and how it ended.

    Raises:
        ValueError: for arguments that do not fit, with what to do about it.

    Examples:
        >>> fit = jcv.fit(problem, key=jax.random.key(0))  # doctest: +SKIP
        >>> fit.sample(jax.random.key(1), 1000)  # doctest: +SKIP
    """
    check_key(key)
    remedy = "Pass jointcv.Problem(...), or an algorithm."
    check_type("problem", problem, Problem | AbstractAlgorithm, remedy)
    parts: dict[str, Any] = dict(control=control, family=family, optimizer=optimizer, batch_size=batch_size)
    parts |= dict(sampler=sampler, view=view, noise=noise)
    if naive_epochs is not None:
        naive_epochs = check_count("naive_epochs", naive_epochs, "epochs", least=0)
    if isinstance(problem, AbstractAlgorithm):
        algorithm = problem
        _check_alone(parts | dict(naive_epochs=naive_epochs))
        steps = _num_steps(num_epochs, num_steps, _steps_per_epoch(algorithm))
    else:
        objective, control, sampler, optimizer = plan(problem, memory_budget=memory_budget, **parts)
        steps_per_epoch = sampler.steps_per_epoch(objective.num_data)
        steps = _num_steps(num_epochs, num_steps, steps_per_epoch)
        if isinstance(optimizer, NaturalGradient):
            if naive_epochs:
                raise ValueError(
                    f"naive_epochs={naive_epochs}: natural steps have none. Leave it out, or pass an optax optimizer."
                )
            algorithm = optimizer.build(objective, control, sampler)
        else:
            if optimizer is None:
                optimizer = optax.adam(optax.cosine_decay_schedule(0.05, steps))
            naive_steps = _naive_epochs(naive_epochs, control) * steps_per_epoch
            algorithm = GradientDescent(
                objective=objective,
                control=control,
                sampler=sampler,
                optimizer=optimizer,
                naive_steps=naive_steps,
            )
    run = start(algorithm, key)
    finished = _continue(
        algorithm,
        run,
        {},
        0.0,
        steps,
        progress=progress,
        chunk_size=chunk_size,
        elbo_every=elbo_every,
        elbo_draws=elbo_draws,
    )
    return finished if problem is algorithm else dataclasses.replace(finished, source=problem)


def _continue(
    algorithm: AbstractAlgorithm,
    run: Run,
    history: dict[str, np.ndarray],
    seconds: float,
    num_steps: int,
    *,
    progress: bool = False,
    chunk_size: int = CHUNK_SIZE,
    elbo_every: int | None = None,
    elbo_draws: int = 100,
) -> Fit:
    chunk_size = check_count("chunk_size", chunk_size, "steps")
    elbo_draws = check_count("elbo_draws", elbo_draws, "draws")
    began = time.perf_counter()
    steps_per_epoch = _steps_per_epoch(algorithm)
    first = int(run.step)
    record = _Record(history)
    schedule = None
    with tqdm(total=num_steps, disable=not progress, unit="step") as bar:
        for stop in _stops(first, first + num_steps, elbo_every, steps_per_epoch):
            for chunk in plan_chunks(int(run.step), stop, steps_per_epoch, chunk_size):
                run, infos, schedule = run_chunk(algorithm, run, chunk, schedule)
                infos = jax.device_get(infos)
                record.steps(infos)
                bar.update(chunk.length)
                bar.set_postfix(loss=f"{infos.loss[-1]:.6g}", refresh=False)
                if not infos.finite.all():
                    break
            if not bool(run.alive):
                break
            if elbo_every is not None:
                key = jax.random.fold_in(jax.random.fold_in(run.key, 3), stop)
                value = full_value(
                    algorithm.objective, algorithm.params(run.state), key, num_draws=elbo_draws
                )
                record.elbo(stop, value)
    seconds += time.perf_counter() - began
    params = result(algorithm, run)
    return Fit(algorithm, run, params, record.history(), record.status(), seconds)


class _Record:
    """Collects what chunks tell."""

    def __init__(self, history: dict[str, np.ndarray]):
        self._lists: dict[str, list[np.ndarray]] = {name: [values] for name, values in history.items()}
        self._diverged_at: int | None = None

    def steps(self, infos) -> None:
        finite = np.atleast_1d(infos.finite)
        count = len(finite) if finite.all() else int(np.argmin(finite))
        told = {"loss": infos.loss, "gradient_norm": infos.gradient_norm} | infos.notes
        for name, values in told.items():
            self._lists.setdefault(name, []).append(np.asarray(values)[:count])
        if count < len(finite):
            self._diverged_at = sum(map(len, self._lists["loss"]))

    def elbo(self, step: int, value: Estimate) -> None:
        for name, number in (
            ("elbo_step", step),
            ("elbo", -value.value),
            ("elbo_standard_error", value.standard_error),
        ):
            self._lists.setdefault(name, []).append(np.asarray([number]))

    def history(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(parts) for name, parts in self._lists.items()}

    def status(self) -> str:
        return "completed" if self._diverged_at is None else f"diverged at step {self._diverged_at}"


def _stops(first: int, last: int, every: int | None, steps_per_epoch: int) -> list[int]:
    """Where the loop pauses for an evaluation; at the end in any case."""
    if every is None:
        return [last]
    period = check_count("elbo_every", every, "epochs") * steps_per_epoch
    stops = [stop for stop in range(0, last, period) if stop > first]
    return [*stops, last]


def _num_steps(num_epochs: int | float | None, num_steps: int | None, steps_per_epoch: int) -> int:
    if num_epochs is not None and num_steps is not None:
        raise ValueError(
            f"num_epochs={num_epochs} and num_steps={num_steps} are both given. Give one of them."
        )
    for name, number in (("num_epochs", num_epochs), ("num_steps", num_steps)):
        if isinstance(number, bool) or not isinstance(number, int | float | np.number | None):
            raise ValueError(f"{name}={number!r} is not a number. Use at least one step.")
    count = (
        num_steps if num_steps is not None else (30 if num_epochs is None else num_epochs) * steps_per_epoch
    )
    if not 0 < count < math.inf:
        raise ValueError(
            f"num_epochs={num_epochs}, num_steps={num_steps}: nothing to run. Use at least one step."
        )
    if num_steps is not None and num_steps != math.floor(num_steps):
        raise ValueError(
            f"num_steps={num_steps} is no whole number. Use one, or num_epochs for parts of an epoch."
        )
    return math.ceil(count)


def _naive_epochs(naive_epochs: int | None, control: AbstractControl) -> int:
    if naive_epochs is None:
        return 0 if isinstance(control.memory, NoMemory) else 1
    return naive_epochs


def _check_alone(parts: dict[str, Any]) -> None:
    """Nothing is said beside an algorithm that is already in it."""
    given = [name for name, value in parts.items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} given beside an algorithm, which has its own. Leave them out, or pass a Problem."
        )


def _steps_per_epoch(algorithm: AbstractAlgorithm) -> int:
    return algorithm.sampler.steps_per_epoch(algorithm.objective.num_data)


def _elbo(algorithm: AbstractAlgorithm) -> Elbo:
    if not isinstance(algorithm.objective, Elbo):
        raise ValueError(
            f"the objective {type(algorithm.objective).__name__} is no posterior: there is nothing to draw."
        )
    return algorithm.objective
