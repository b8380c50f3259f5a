"""Ways to fit one posterior, each timed epoch by epoch: natural steps, and what they stand beside.

natural   jcv.fit(problem, key=key): no step size, no batch size
adam      the joint control with Adam, from the same start
numpyro   NumPyro's own SVI: AutoNormal, a subsampled plate, all steps of an epoch in one compiled loop
lbfgs     SciPy's L-BFGS on the full data: quadrature, or four draws of noise in η that are kept

The first epoch is run twice. What the first time takes longer is compilation, and for ours reading the model.
"""

import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import scipy.optimize
from jax.flatten_util import ravel_pytree
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import jointcv as jcv
from jointcv.evaluate import full_values
from jointcv.loop import Chunk, result, run_chunk, start
from jointcv.paper.tasks import ADAM_GRID
from judge import Judge, double

KEY = jax.random.key(0)
WHOLE_EPOCH = 10**9  # a chunk
BATCHES = 100, 1000
COMMON_DRAWS, PASS_SIZE = 4, 10_000
DECAYS = 0, 20, 100  # epochs of a cosine decay; 0 for a constant step
LONGEST, MOST_EVALUATIONS = 100, 3000


class Record:
    """The ELBO along a run, looked at while the clock stands."""

    def __init__(self, look: Judge, stop_at: float):
        self.rows: list[dict[str, float]] = []
        self.overhead = 0.0
        self.notes: dict[str, float] = {}
        self._look, self._stop_at = look, stop_at
        self._seconds, self._began = 0.0, time.perf_counter()

    def begin(self) -> None:
        """The clock starts; all before it was compilation."""
        self._began = time.perf_counter()

    def tell(self, passes: int, params: Callable[[], jcv.MeanFieldParams]) -> bool:
        """Where the run is after so many passes over the data; whether it may stop."""
        self._seconds += time.perf_counter() - self._began
        seen = self._look(params())
        self.rows.append({"epoch": passes, "seconds": self._seconds, **seen})
        self._began = time.perf_counter()
        return not seen["elbo"] < self._stop_at

    def first_time(self, seconds: float, again: float | None = None) -> None:
        """What the first epoch took when nothing was compiled; and then, if not as the record has it."""
        again = self.rows[0]["seconds"] if again is None else again
        self.overhead = max(0.0, seconds - again)


def natural(problem: jcv.Problem, record: Record, num_epochs: int) -> None:
    # A model that a datum sees whole has to be told; what it is told is the same for all.
    linear = isinstance(jcv.find_view(problem).view, jcv.LinearView)
    _run(problem, record, num_epochs, optimizer=None if linear else jcv.NaturalGradient())


def adam(problem: jcv.Problem, record: Record, num_epochs: int, batch: int, rate: float, decay: int) -> None:
    steps = (decay or 1) * math.ceil(problem.num_data / batch)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps) if decay else rate)
    family = jcv.MeanField(jcv.ConstantStart())
    _run(problem, record, num_epochs, optimizer=optimizer, batch_size=batch, family=family)


def _run(problem: jcv.Problem, record: Record, num_epochs: int, **options) -> None:
    began = time.perf_counter()
    fit = jcv.fit(problem, key=KEY, num_epochs=1, chunk_size=WHOLE_EPOCH, **options)
    first = time.perf_counter() - began
    algorithm = fit.algorithm
    steps = algorithm.sampler.steps_per_epoch(algorithm.objective.num_data)
    record.begin()
    run = start(algorithm, KEY)
    for epoch in range(num_epochs):
        run, infos, _ = run_chunk(algorithm, run, Chunk(epoch * steps, steps, 1), None)
        jax.block_until_ready(run)
        record.notes = {name: float(values[-1]) for name, values in infos.notes.items()}
        if record.tell(epoch + 1, partial(result, algorithm, run)) or not bool(run.alive):
            break
    record.notes |= {"batch": float(algorithm.sampler.batch_size), "alive": float(run.alive)}
    record.first_time(first)


def bradley_terry(data, num_data: int, dim: int, batch: int) -> None:
    skill = numpyro.sample("z", dist.Normal(jnp.zeros(dim), 1).to_event(1))
    with numpyro.plate("matches", num_data, subsample_size=batch) as index:
        logits = skill[data["winner"][index]] - skill[data["loser"][index]]
        numpyro.sample("won", dist.Bernoulli(logits=logits), obs=jnp.ones(batch))


def softmax_regression(data, num_data: int, dim: int, batch: int) -> None:
    width = data["x"].shape[1]
    weights = numpyro.sample("z", dist.Normal(jnp.zeros((width, dim // width)), 1).to_event(2))
    with numpyro.plate("images", num_data, subsample_size=batch) as index:
        logits = data["x"][index] @ weights
        numpyro.sample("label", dist.Categorical(logits=logits), obs=data["y"][index])


MODELS = {"tennis": bradley_terry, "mnist": softmax_regression}


def numpyro_svi(
    problem: jcv.Problem, record: Record, num_epochs: int, task: str, batch: int, rate: float
) -> None:
    began = time.perf_counter()
    model = partial(MODELS[task], num_data=problem.num_data, dim=problem.dim, batch=batch)
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(rate), Trace_ELBO())
    steps = math.ceil(problem.num_data / batch)

    @jax.jit
    def advance(state, data):
        return jax.lax.scan(lambda state, _: svi.update(state, data), state, None, length=steps)[0]

    def params(state):
        found = svi.get_params(state)
        location, scale = (jnp.ravel(found[f"z_auto_{name}"]) for name in ("loc", "scale"))
        return jcv.MeanFieldParams(location, jnp.log(scale))

    state = begin = svi.init(KEY, problem.data)
    jax.block_until_ready(advance(state, problem.data))
    first = time.perf_counter() - began
    record.begin()
    for epoch in range(num_epochs):
        state = jax.block_until_ready(advance(begin if epoch == 0 else state, problem.data))
        if record.tell(epoch + 1, partial(params, state)):
            break
    record.first_time(first)


def lbfgs(problem: jcv.Problem, record: Record, num_epochs: int, wide: bool) -> None:
    """Passes count evaluations of the objective and its gradient."""
    began = time.perf_counter()
    objective, _, _ = jcv.assemble(double(problem) if wide else problem)
    draws = 1 if isinstance(objective.noise, jcv.Quadrature) else COMMON_DRAWS
    params = jcv.MeanField(jcv.ConstantStart()).init(KEY, objective.problem)
    flat, unravel = ravel_pytree(params)

    passes, value_and_gradient = 0, for_scipy(objective, unravel, flat.dtype, draws)

    def evaluate(position: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal passes
        passes += 1
        return value_and_gradient(position)

    evaluate(np.asarray(flat))
    first, began = time.perf_counter() - began, time.perf_counter()
    evaluate(np.asarray(flat))
    record.first_time(first, time.perf_counter() - began)
    passes = 0

    def look(intermediate_result: scipy.optimize.OptimizeResult) -> None:
        position = jnp.asarray(intermediate_result.x, flat.dtype)
        if record.tell(passes, partial(unravel, position)):
            raise StopIteration

    record.begin()
    limits = {"maxfun": num_epochs, "maxiter": num_epochs, "ftol": 1e-15, "gtol": 1e-9}
    ended = scipy.optimize.minimize(
        evaluate, np.asarray(flat, np.float64), jac=True, method="L-BFGS-B", callback=look, options=limits
    )
    record.notes = {"evaluations": float(passes), "success": float(ended.success)}


def for_scipy(
    objective: jcv.Elbo, unravel: Callable[[Any], jcv.MeanFieldParams], dtype, num_draws: int
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """The negative ELBO on the full data, with draws that stay the same, and its gradient in a flat vector."""
    chunk_size = min(PASS_SIZE, objective.num_data)

    @eqx.filter_jit
    def compiled(flat, objective):
        def value(flat):
            values = full_values(objective, unravel(flat), KEY, num_draws=num_draws, chunk_size=chunk_size)
            return jnp.mean(values)

        return jax.value_and_grad(value)(flat)

    def evaluate(position: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = compiled(jnp.asarray(position, dtype), objective)
        return float(value), np.asarray(gradient, np.float64)

    return evaluate


Method = partial[None]  # of a problem and a record, with the `num_epochs` that it takes


def peers(task: str) -> dict[str, Method]:
    """What natural steps stand beside, by name: the kind, a comma, and its setting."""
    found: dict[str, Method] = {}
    if task == "movielens":  # any constant step size, as long as it takes
        for rate in ADAM_GRID:
            found[_name("adam", 100, rate, 0)] = partial(
                adam, num_epochs=LONGEST, batch=100, rate=rate, decay=0
            )
    if task not in MODELS:
        return found
    for batch, rate in itertools.product(BATCHES, ADAM_GRID):
        for decay in DECAYS:
            found[_name("adam", batch, rate, decay)] = partial(
                adam, num_epochs=decay or LONGEST, batch=batch, rate=rate, decay=decay
            )
        found[_name("numpyro", batch, rate, 0)] = partial(
            numpyro_svi, num_epochs=LONGEST, task=task, batch=batch, rate=rate
        )
    for wide in (False, True):
        found[f"lbfgs, float{64 if wide else 32}"] = partial(lbfgs, num_epochs=MOST_EVALUATIONS, wide=wide)
    return found


def _name(kind: str, batch: int, rate: float, decay: int) -> str:
    return f"{kind}, batch {batch}, step {rate:g}, {f'cosine over {decay} epochs' if decay else 'constant'}"
