"""NumPyro's own interface: an `SVI` that takes controlled gradients, and nothing else in a program changes.

    svi = jointcv.numpyro.SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), Trace_ELBO())
    result = svi.run(random.key(0), 10_000, X, y)

The guide says where a run starts and what its parameters are called; NumPyro sets it up. The steps are those of
`jointcv.fit`: a problem read from the model, a control with its memory, an algorithm.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.infer
from jax.core import Tracer
from jaxtyping import Array, Bool, Scalar
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from numpyro.infer.svi import SVIRunResult, SVIState
from numpyro.optim import Minimize

from jointcv.algorithm.gradient import GradientDescent
from jointcv.algorithm.interface import AbstractAlgorithm
from jointcv.algorithm.natural import NaturalGradient
from jointcv.checks import check_count
from jointcv.control import AbstractControl
from jointcv.family import MeanField, MeanFieldParams
from jointcv.guide import GUIDES, GuideMap, GuideStart, map_guide, through_guide
from jointcv.loop import result
from jointcv.memory import NoMemory
from jointcv.numpyro_model import NumPyroModel, trace_model
from jointcv.plan import assemble
from jointcv.sampler import AbstractSampler
from jointcv.stepwise import Progress, begin, run_chunks, run_steps, stable_step, step

LOSSES = (Trace_ELBO, TraceMeanField_ELBO)  # the same expectation under a mean field
PROBES = 16  # entries of an array that are compared where it is traced


class _Bound(NamedTuple):
    """What belongs to the arguments of a model: an algorithm, and its parameters in the guide's names."""

    args: tuple
    kwargs: dict[str, Any]
    algorithm: AbstractAlgorithm
    guide: GuideMap
    params: dict[str, tuple[int, ...]]  # shapes, by the guide's names
    progress: list[tuple[int, ...]]  # shapes of a state


class SVI:
    """`numpyro.infer.SVI` with controlled gradients: the same calls and the same results.

    The minibatches are jointcv's own, of the plate's `subsample_size` (100 where it has none): every datum is seen
    once an epoch, and remembered. So the arguments of the model belong to a run, from `init` to its last `update`.

    Args:
        model: a model that `jointcv.from_numpyro` can read.
        guide: an `AutoNormal` or an `AutoDiagonalNormal` of the model.
        optim: an optimiser of NumPyro, JAX or optax; or `jointcv.NaturalGradient()`.
        loss: `Trace_ELBO()` or `TraceMeanField_ELBO()`.
        control: the control variate; `jointcv.JointCV()` by default, `jointcv.NaiveGradient()` for none.
        sampler: how minibatches are drawn, where the plate's subsample size is not to decide.
        data_plate: the name of the data plate, where more than one could be meant.
        **static_kwargs: arguments of the model that stay the same.

    Raises:
        ValueError: for a guide, a loss or an optimiser that it cannot serve.

    Examples:
        >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), Trace_ELBO())  # doctest: +SKIP
        >>> result = svi.run(jax.random.key(0), 10_000, X, y)  # doctest: +SKIP
        >>> svi.guide.sample_posterior(jax.random.key(1), result.params)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Callable,
        guide: AutoNormal | AutoDiagonalNormal,
        optim: Any,
        loss: Any = None,
        *,
        control: AbstractControl | None = None,
        sampler: AbstractSampler | None = None,
        data_plate: str | None = None,
        **static_kwargs: Any,
    ):
        loss = Trace_ELBO() if loss is None else loss
        _check_guide(guide)
        _check_loss(loss)
        self.model, self.guide, self.loss, self.static_kwargs = model, guide, loss, static_kwargs
        self.control, self.sampler, self.data_plate = control, sampler, data_plate
        # NumPyro's own accepts the same optimisers and sets up the guide, with the model that it was made of.
        natural = isinstance(optim, NaturalGradient)
        self._numpyro = numpyro.infer.SVI(
            guide.model, guide, numpyro.optim.SGD(1.0) if natural else optim, loss, **static_kwargs
        )
        self.optim = optim if natural else self._numpyro.optim
        if isinstance(self.optim, Minimize):
            raise ValueError(
                "optim=Minimize() evaluates the loss as often as it likes, which minibatches do not allow. "
                "Use a stochastic optimiser, for example numpyro.optim.Adam(1e-2)."
            )
        self._bound: _Bound | None = None

    def init(self, rng_key, *args, init_params: dict[str, Any] | None = None, **kwargs) -> SVIState:
        """The first state; NumPyro's own start of the guide, and every datum seen there once.

        Args:
            rng_key: a JAX key.
            *args: arguments of the model; they belong to the run from here on.
            init_params: values of the guide's parameters in place of its own start, by name.
            **kwargs: keyword arguments of the model.
        """
        bound, other = self._bind(rng_key, args, kwargs)
        _check_init_params(init_params, bound.params)
        first = self._numpyro.init(rng_key, *args, init_params=init_params, **kwargs)
        params = bound.guide.read(self._numpyro.get_params(first))
        algorithm = eqx.tree_at(lambda a: a.objective.family.start, bound.algorithm, GuideStart(params))
        progress = _refuse_others(begin(algorithm, _typed(first.rng_key)), other)
        return SVIState(progress, None, first.rng_key)

    def get_params(self, svi_state: SVIState) -> dict[str, Array]:
        """The guide's parameters by name."""
        if self._bound is None:
            raise ValueError("This SVI has not seen its model's arguments. Call init() or run() first.")
        return self._bound.guide.write(result(self._bound.algorithm, _progress(svi_state).run))

    def update(
        self, svi_state: SVIState, *args, forward_mode_differentiation: bool = False, **kwargs
    ) -> tuple[SVIState, Array]:
        """One step on the next minibatch. A run that has met a non-finite loss stays at its last good state.

        Args:
            svi_state: the state; a pytree with the memory's table in it.
            *args: the arguments that `init` had.
            forward_mode_differentiation: not supported.
            **kwargs: the keyword arguments that `init` had.

        Returns:
            The next state, and the step's estimate of the loss.
        """
        _check_reverse_mode(forward_mode_differentiation)
        progress, loss = step(*self._going_on(svi_state, args, kwargs))
        return svi_state._replace(optim_state=progress), loss

    def stable_update(
        self, svi_state: SVIState, *args, forward_mode_differentiation: bool = False, **kwargs
    ) -> tuple[SVIState, Array]:
        """As `update`; but a step with a non-finite loss or gradient is skipped, and the run goes on."""
        _check_reverse_mode(forward_mode_differentiation)
        progress, loss = stable_step(*self._going_on(svi_state, args, kwargs))
        return svi_state._replace(optim_state=progress), loss

    def run(
        self,
        rng_key,
        num_steps: int,
        *args,
        progress_bar: bool = True,
        stable_update: bool = False,
        forward_mode_differentiation: bool = False,
        init_state: SVIState | None = None,
        init_params: dict[str, Any] | None = None,
        **kwargs,
    ) -> SVIRunResult:
        """So many steps from the start, or from `init_state`.

        Args:
            rng_key: a JAX key.
            num_steps: how many steps.
            *args: arguments of the model.
            progress_bar: whether to show a progress bar.
            stable_update: whether to skip steps whose loss or gradient is not finite.
            forward_mode_differentiation: not supported.
            init_state: the state of an earlier run with the same arguments, to go on from.
            init_params: values of the guide's parameters in place of its own start, by name.
            **kwargs: keyword arguments of the model.

        Returns:
            The guide's parameters, the last state, and the loss of every step.
        """
        check_count("num_steps", num_steps, "steps")
        _check_reverse_mode(forward_mode_differentiation)
        if init_state is None:
            state = self.init(rng_key, *args, init_params=init_params, **kwargs)
        else:
            state = init_state
        algorithm, progress = self._going_on(state, args, kwargs)
        if stable_update or _is_traced(progress):
            progress, losses = run_steps(algorithm, progress, num_steps, stable_update)
        else:
            progress, losses = run_chunks(algorithm, progress, num_steps, progress_bar)
        state = state._replace(optim_state=progress)
        return SVIRunResult(self.get_params(state), state, losses)

    def evaluate(self, svi_state: SVIState, *args, **kwargs) -> Array:
        """NumPyro's own loss at the state's parameters, on any data."""
        key = jax.random.fold_in(svi_state.rng_key, _progress(svi_state).run.step)
        params = self.get_params(svi_state)
        return self.loss.loss(key, params, self.model, self.guide, *args, **kwargs, **self.static_kwargs)

    def _going_on(self, svi_state: SVIState, args, kwargs) -> tuple[AbstractAlgorithm, Progress]:
        """The algorithm of these arguments, and the state in it; both must belong to each other."""
        if self._bound is None:
            bound, other = self._bind(jax.random.key(0), args, kwargs)
        else:
            bound, other = self._bound, _differ((self._bound.args, self._bound.kwargs), (args, kwargs))
        progress = _progress(svi_state)
        if _shapes(progress) != bound.progress:
            raise ValueError(OTHER_STATE)
        return bound.algorithm, _refuse_others(progress, other)

    def _bind(self, rng_key, args, kwargs) -> tuple[_Bound, Bool[Scalar, ""] | None]:
        """What belongs to these arguments, read once; and, where they are traced, whether they are others after all."""
        if self._bound is not None:
            before = self._bound.args, self._bound.kwargs
            if _is_traced((args, kwargs)) or _identical(before, (args, kwargs)):
                return self._bound, _differ(before, (args, kwargs))
        _check_concrete(args, kwargs)
        model = trace_model(
            partial(_call, self.model), args, kwargs | self.static_kwargs, data_plate=self.data_plate
        )
        problem = model.problem()
        batch_size = _batch_size(model) if self.sampler is None else None
        if self.guide.prototype_trace is None:
            self._numpyro.init(rng_key, *args, **kwargs)
        guide = map_guide(self.guide, problem)
        zeros = jnp.zeros(problem.dim, problem.dtype)
        objective, control, sampler = assemble(
            problem,
            control=self.control,
            family=MeanField(GuideStart(MeanFieldParams(zeros, zeros))),
            sampler=self.sampler,
            batch_size=batch_size,
        )
        if not isinstance(self.optim, NaturalGradient):
            naive = 0 if isinstance(control.memory, NoMemory) else sampler.steps_per_epoch(objective.num_data)
            optimizer = through_guide(self.optim, guide)
            algorithm = GradientDescent(
                objective=objective,
                control=control,
                sampler=sampler,
                optimizer=optimizer,
                naive_steps=naive,
            )
        else:
            algorithm = self.optim.build(objective, control, sampler)
        params = {name: leaf.shape for name, leaf in guide.write(MeanFieldParams(zeros, zeros)).items()}
        progress = _shapes(eqx.filter_eval_shape(begin, algorithm, jax.random.key(0)))
        self._bound = _Bound(args, kwargs, algorithm, guide, params, progress)
        return self._bound, None


def _call(model, args, kwargs):
    return model(*args, **kwargs)


def _batch_size(model: NumPyroModel) -> int | None:
    """The plate's subsample size, where it has one."""
    size = model.subsample_size
    if size is not None and size > model.num_data:
        raise ValueError(
            f"Plate '{model.data_plate}' has subsample_size={size}, more than its {model.num_data} data. Use at most "
            "that many; all the data belong to one call, minibatches are drawn inside."
        )
    return None if size == model.num_data else size


def _shapes(progress: Progress) -> list[tuple[int, ...]]:
    return [jnp.shape(leaf) for leaf in jax.tree.leaves(progress)]


def _is_traced(tree) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def _typed(key):
    """A key of the new style."""
    is_raw = not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(key) if is_raw else key


# What is refused -------------------------------------------------------------------------------------------


def _check_guide(guide) -> None:
    if type(guide) not in GUIDES:
        name = getattr(guide, "__name__", type(guide).__name__)
        raise ValueError(
            f"guide={name} is not supported: jointcv.numpyro.SVI serves the mean-field guides AutoNormal and "
            "AutoDiagonalNormal. Use one of them, or numpyro.infer.SVI."
        )


def _check_loss(loss) -> None:
    if type(loss) not in LOSSES:
        raise ValueError(
            f"loss={type(loss).__name__} is not supported. Use Trace_ELBO() or TraceMeanField_ELBO(), which have the "
            "same expectation under a mean-field guide."
        )
    if getattr(loss, "num_particles", 1) != 1:
        raise ValueError(
            f"loss has num_particles={loss.num_particles}. Use 1: the control takes away the noise that more would "
            "average."
        )
    if getattr(loss, "multi_sample_guide", False) or not getattr(loss, "sum_sites", True):
        raise ValueError("loss has multi_sample_guide=True or sum_sites=False. Use Trace_ELBO().")


def _check_concrete(args, kwargs) -> None:
    if _is_traced((args, kwargs, jnp.zeros(()))):
        raise ValueError(
            "The model is read when its arguments are first seen, which cannot happen inside jax.jit. Call init() "
            "with them outside first; then init(), update() and run() may be compiled."
        )


def _check_init_params(init_params: dict[str, Any] | None, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, value in (init_params or {}).items():
        if jnp.shape(value) != shapes.get(name):
            raise ValueError(
                f"init_params[{name!r}] has the shape {jnp.shape(value)}; the guide's parameters are {shapes}."
            )


def _check_reverse_mode(forward: bool) -> None:
    if forward:
        raise ValueError(
            "forward_mode_differentiation=True is not supported. Use False; a model with a while_loop needs "
            "numpyro.infer.SVI."
        )


OTHER_STATE = (
    "The state is not one of this SVI and these arguments. Pass what init(), update() or run() of jointcv.numpyro.SVI "
    "returned for the same arguments."
)

OTHER_ARGUMENTS = (
    "The model's arguments are not those that init() had. A run remembers every datum, so pass all the data to init() "
    "and the same arguments to update(): minibatches are drawn inside. For new data call init() again."
)


def _progress(svi_state: SVIState) -> Progress:
    if not isinstance(svi_state.optim_state, Progress):
        raise ValueError(OTHER_STATE)
    return svi_state.optim_state


def _identical(before, now) -> bool:
    leaves, structure = jax.tree.flatten(before)
    others, other_structure = jax.tree.flatten(now)
    return structure == other_structure and all(
        leaf is other for leaf, other in zip(leaves, others, strict=True)
    )


def _differ(before, now) -> Bool[Scalar, ""] | None:
    """Whether traced arguments are others than before, where they are looked at; others that are not raise here."""
    leaves, structure = jax.tree.flatten(before)
    others, other_structure = jax.tree.flatten(now)
    if structure != other_structure:
        raise ValueError(OTHER_ARGUMENTS)
    traced = []
    for leaf, other in zip(leaves, others, strict=True):
        if leaf is other:
            continue
        if isinstance(other, Tracer) and jnp.shape(leaf) == jnp.shape(other):
            probes = np.linspace(0, np.size(leaf) - 1, min(PROBES, np.size(leaf))).astype(int)
            traced.append(jnp.any(_unequal(jnp.ravel(other)[probes], np.ravel(leaf)[probes])))
        elif (
            isinstance(other, Tracer) or jnp.shape(leaf) != jnp.shape(other) or np.any(_unequal(leaf, other))
        ):
            raise ValueError(OTHER_ARGUMENTS)
    return jnp.any(jnp.stack(traced)) if traced else None


def _unequal(one, other):
    """Where entries differ; a missing value, NaN, is what it was."""
    return (one != other) & ((one == one) | (other == other))


def _refuse_others(progress: Progress, differ: Bool[Scalar, ""] | None) -> Progress:
    if differ is None:
        return progress
    # Whatever comes of the state hangs on the number of its step.
    return eqx.tree_at(
        lambda p: p.run.step, progress, eqx.error_if(progress.run.step, differ, OTHER_ARGUMENTS)
    )
