"""A NumPyro model run abstractly: its sites and plates, and the jaxpr of their log densities and values."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro import factor, handlers
from numpyro.distributions.transforms import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.infer import init_to_uniform
from numpyro.infer.util import compute_log_probs
from numpyro.primitives import Messenger

from jointcv.jaxprs import flatten
from jointcv.numpyro_rows import Run


class Call:
    """A model and its arguments. Compared by identity, so it can be static: jit need not carry the arrays."""

    def __init__(self, model: Callable, args: tuple, kwargs: dict, rows: dict[str, Any] | None):
        self.model, self.args, self.kwargs, self.rows = model, args, kwargs, rows

    def arguments(self, indices) -> tuple[tuple, dict]:
        """The arguments, with these of the rows."""
        rows = {} if self.rows is None else jax.tree.map(lambda leaf: leaf[indices], self.rows)
        return self.args, {**self.kwargs, **rows}

    def inside(self, handler: Callable) -> "Call":
        """The same call, with the model inside a handler."""
        return Call(handler(self.model), self.args, self.kwargs, self.rows)


class _Indexable(np.ndarray):
    """A NumPy array that traced indices can index; still concrete, as `int(group.max())` in a model needs."""

    array: Array | None = None

    def __getitem__(self, key):
        if any(isinstance(part, jax.Array) for part in (key if isinstance(key, tuple) else (key,))):
            return (jnp.asarray(np.asarray(self)) if self.array is None else self.array)[key]
        return super().__getitem__(key)


def indexable(leaf):
    if type(leaf) is not np.ndarray or leaf.dtype.kind not in "biuf":
        return leaf
    indexable = leaf.view(_Indexable)
    indexable.array = jnp.asarray(leaf)
    return indexable


class Plate(NamedTuple):
    size: int
    subsample_size: int | None


class Plates(Messenger):
    """Gives the data plate these indices and other plates all of theirs, without the scale of N / batch."""

    def __init__(self, fn: Callable, plate: str | None, indices):
        super().__init__(fn)
        self.plate, self.indices = plate, indices
        self.plates: dict[str, Plate] = {}

    def process_message(self, msg):
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            self.plates[msg["name"]] = Plate(size, subsample_size)
            msg["value"] = self.indices if msg["name"] == self.plate else jnp.arange(size)
            msg["args"] = (size, None)
        if msg["type"] == "sample" and self.plate in _frames(msg) and self.plate in self.plates:
            repeats = self.plates[self.plate].size / self.indices.shape[0]
            msg["scale"] = msg["scale"] / repeats if repeats != 1 else msg["scale"]


class Site(NamedTuple):
    """What a trace says of a site, without its values."""

    type: str
    is_observed: bool
    shape: tuple[int, ...]
    unconstrained_shape: tuple[int, ...] | None
    log_prob_shape: tuple[int, ...] | None
    plates: dict[str, int]
    in_control_flow: bool

    @property
    def is_latent(self) -> bool:
        return self.type == "sample" and not self.is_observed

    @property
    def is_factor(self) -> bool:
        return self.shape[-1:] == (0,)


class Structure(NamedTuple):
    sites: dict[str, Site]
    plates: dict[str, Plate]

    @property
    def latents(self) -> dict[str, Site]:
        return {name: site for name, site in self.sites.items() if site.is_latent}


def _frames(msg) -> dict[str, int]:
    return {frame.name: frame.dim for frame in msg.get("cond_indep_stack") or ()}


def _describe(msg, log_prob=None) -> Site:
    shape, unconstrained_shape = jnp.shape(msg["value"]), None
    if msg["type"] == "sample" and not msg["is_observed"]:
        unconstrained_shape = biject_to(msg["fn"].support).inverse_shape(shape)
    return Site(
        type=msg["type"],
        is_observed=bool(msg.get("is_observed")),
        shape=shape,
        unconstrained_shape=unconstrained_shape,
        log_prob_shape=None if log_prob is None else jnp.shape(log_prob),
        plates=_frames(msg),
        in_control_flow=msg.get("_control_flow_done", False),
    )


def few_indices(count: int, num_data: int) -> Array:
    """A few indices, spread over the data."""
    return jnp.asarray(np.linspace(0, num_data - 1, count).round().astype(int))


def read_structure(call: Call, plate: str | None, indices, seed: int = 0) -> Structure:
    """The model's sites and plates, from an abstract run."""
    found = []

    def run(indices):
        model = handlers.substitute(handlers.seed(call.model, seed), substitute_fn=init_to_uniform)
        handler = Plates(model, plate, indices)
        args, kwargs = call.arguments(indices)
        trace = handlers.trace(handler).get_trace(*args, **kwargs)
        sites = {name: _describe(msg) for name, msg in trace.items() if msg["type"] != "plate"}
        found.append(Structure(sites, handler.plates))

    with _explained():
        jax.eval_shape(run, indices)
    return found[0]


def _unconstrained(z, msg):
    """The constrained value of a latent site; its Jacobian joins the model as a factor, as NumPyro has it."""
    if msg["type"] != "sample" or msg["name"] not in z:
        return None
    support, point = msg["fn"].support, z[msg["name"]]
    if getattr(support, "base_constraint", support) is dist.constraints.real:
        return point
    transform = biject_to(support)
    value = transform(point)
    log_det = transform.log_abs_det_jacobian(point, value)
    event_ndim = len(msg["fn"].event_shape)
    factor(f"_{msg['name']}_log_det", sum_rightmost(log_det, log_det.ndim - value.ndim + event_ndim))
    return value


def trace_run(call: Call, plate: str | None, example, indices) -> tuple[Run, dict[str, Site]]:
    """The jaxpr of (z, indices) -> log density and value of every site."""
    sites: dict[str, Site] = {}

    def run(z, indices):
        model = handlers.substitute(call.model, substitute_fn=partial(_unconstrained, z))
        args, kwargs = call.arguments(indices)
        log_probs, trace = compute_log_probs(
            Plates(model, plate, indices), args, kwargs, {}, sum_log_prob=False
        )
        for name, msg in trace.items():
            if msg["type"] in ("sample", "deterministic"):
                sites[name] = _describe(msg, log_probs.get(name))
        values = {name: jnp.asarray(trace[name]["value"]) for name in sites}
        return {"log_prob": jax.tree.map(jnp.sum, log_probs), "value": values}

    with _explained():
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(example, indices)
    slots = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jax.tree.leaves(shapes))))
    return Run(flatten(closed), slots), sites


@contextmanager
def _explained():
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    ) as error:
        raise ValueError(
            "The model needs the concrete value of a latent variable or of the plate's indices, which "
            f"stochastic control flow does: {str(error).splitlines()[0]} Replace Python conditions on "
            "values by jnp.where, pass sizes as plain numbers, and pass NumPy arrays as arguments instead of "
            "capturing them."
        ) from error
