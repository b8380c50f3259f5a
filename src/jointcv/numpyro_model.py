"""A NumPyro model as a problem: log p(z) and log p(x_n | z), read from one run of the model.

The model is run once, abstractly, with the data plate's indices replaced by a single symbolic index. Every
value of the resulting jaxpr then depends on

    the index but not on z    row values: computed once for all n, they become the data
    neither                   constants: computed once, they become leaves of the callables
    z                         what log_likelihood(z, datum) and log_prior(z) evaluate.

Among the values that separate the model's arrays from z, a minimum cut picks the cheapest to store.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import jit_p
from jaxtyping import Array, PyTree, Scalar
from numpyro import factor, handlers
from numpyro.distributions.transforms import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.infer import Predictive, init_to_uniform
from numpyro.infer.util import compute_log_probs
from numpyro.primitives import Messenger

from jointcv.problem import Problem


def from_numpyro(
    model: Callable, *args, data_plate: str | None = None, data: dict[str, Any] | None = None, **kwargs
) -> Problem:
    """The problem that a NumPyro model states.

    The model has global latent variables and one data plate that it indexes (`with plate(...) as idx`, or
    `numpyro.subsample`); a `subsample_size` makes no difference. Observed sites and factors in the plate are
    the likelihood, everything else is the prior. z is a dict of unconstrained values by site name, as in
    `numpyro.infer.initialize_model`.

    Args:
        model: a function of NumPyro statements; handlers (`reparam`, `scale`, `mask`, ...) may wrap it.
        *args: the model's arguments.
        data_plate: the name of the data plate, where more than one could be meant.
        data: for a model that does not index a plate: the keyword arguments that hold one row a datum.
        **kwargs: the model's other keyword arguments.

    Returns:
        The problem. Its `constrain` gives latent and deterministic sites by name, except deterministic sites
        in the data plate: they have a value for every datum, N times the cost and memory of the others.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> def model(x, y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with numpyro.plate("data", len(y)) as idx:
        ...         numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])
        >>> problem = from_numpyro(model, jnp.ones((50, 3)), jnp.zeros(50))
        >>> problem.num_data, problem.dim
        (50, 3)
    """
    return trace_model(model, *args, data_plate=data_plate, data=data, **kwargs).problem()


def trace_model(
    model: Callable, *args, data_plate: str | None = None, data: dict[str, Any] | None = None, **kwargs
) -> "NumPyroModel":
    """What `from_numpyro` builds the problem from; the same arguments."""
    if data is not None and data_plate is not None:
        raise ValueError(
            f"data_plate={data_plate!r} and data were both given. Pass data= for a model whose arguments "
            "hold the rows, or data_plate= for one that indexes its plate."
        )
    rows = None if data is None else jax.tree.map(jnp.asarray, data)
    call = _Call(model, jax.tree.map(_indexable, args), jax.tree.map(_indexable, kwargs), rows)
    full = _global_structure(call)
    plate = _data_plate(full, data_plate) if rows is None else None
    num_data = full.plates[plate].size if plate is not None else _num_rows(rows)
    single = _structure(call, plate, _first(1, num_data))
    _refuse_local_latents(full, single, plate)
    example = {name: jnp.zeros(site.unconstrained_shape) for name, site in full.latents.items()}
    if not example:
        raise ValueError(
            "The model has no latent site. Give at least one quantity a numpyro.sample statement."
        )
    run, sites = _run(call, plate, example, _first(1, num_data))
    terms = _divide(run, sites, plate)
    likelihood, row_values = run.split("log_prob", terms.likelihood, num_data)
    prior, _ = run.split("log_prob", terms.prior, num_data)
    values, _ = run.split("value", terms.visible, num_data)
    traced = NumPyroModel(
        call=call,
        data_plate=plate,
        num_data=num_data,
        latent_sites=tuple(full.latents),
        likelihood_sites=tuple(terms.likelihood),
        prior_sites=tuple(terms.prior),
        observed_sites=tuple(name for name, site in sites.items() if site.is_observed and not site.is_factor),
        log_prior=SumOfSites(prior),
        log_likelihood=SumOfSites(likelihood),
        constrain=Constrain(values),
        data=run.rows(row_values, num_data),
        example=example,
    )
    _refuse_coupled_rows(traced)
    return traced


class SumOfSites(eqx.Module):
    """A log density: the sum of the log densities of its sites."""

    by_site: "Program"

    def __call__(self, *inputs) -> Scalar:
        return sum(self.by_site(*inputs).values(), start=jnp.zeros(()))


class Constrain(eqx.Module):
    """Latent and global deterministic sites by name, from unconstrained z."""

    by_site: "Program"

    def __call__(self, z) -> dict[str, Array]:
        return self.by_site(z)


class NumPyroModel(eqx.Module):
    """A traced NumPyro model: the parts of its problem, and the model for what needs it again."""

    call: "_Call" = eqx.field(static=True)
    data_plate: str | None = eqx.field(static=True)
    num_data: int = eqx.field(static=True)
    latent_sites: tuple[str, ...] = eqx.field(static=True)
    likelihood_sites: tuple[str, ...] = eqx.field(static=True)
    prior_sites: tuple[str, ...] = eqx.field(static=True)
    observed_sites: tuple[str, ...] = eqx.field(static=True)
    log_prior: SumOfSites
    log_likelihood: SumOfSites
    constrain: Constrain
    data: tuple[Array, ...]
    example: dict[str, Array]

    def problem(self) -> Problem:
        """log p(z), log p(x_n | z) and the rows."""
        return Problem(
            log_prior=self.log_prior,
            log_likelihood=self.log_likelihood,
            data=self.data,
            example=self.example,
            constrain=self.constrain,
        )

    def log_likelihood_by_site(self, z: PyTree[Array], indices) -> dict[str, Array]:
        """log p(x_n | z) of the data with these indices, for every site (and factor) in the plate."""
        rows = jax.tree.map(lambda leaf: leaf[jnp.asarray(indices)], self.data)
        return jax.vmap(partial(self.log_likelihood.by_site, z))(rows)

    def observed(self) -> dict[str, Array]:
        """The observed values by site name, all rows, shaped as the model has them."""
        indices = jnp.arange(self.num_data)
        run, _ = _run(self.call, self.data_plate, self.example, indices)
        return run.program("value", self.observed_sites)(self.example, indices)

    def predictive(
        self, key, samples: dict[str, Array], *, sites: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Draws of the observed sites given draws of the latent sites, for all rows.

        Args:
            key: a jax.random key.
            samples: constrained values by site name with a leading axis of draws, as `constrain` gives them.
            sites: the sites to return; the observed ones by default.
        """
        latent = {name: samples[name] for name in self.latent_sites}
        model = _Plates(handlers.uncondition(self.call.model), None, None)
        args, kwargs = self.call.arguments(jnp.arange(self.num_data))
        names = list(self.observed_sites if sites is None else sites)
        return Predictive(model, latent, return_sites=names)(key, *args, **kwargs)


# Running the model -----------------------------------------------------------------------------------------


class _Call:
    """A model and its arguments. Compared by identity, so it can be static: jit need not carry the arrays."""

    def __init__(self, model: Callable, args: tuple, kwargs: dict, rows: dict[str, Any] | None):
        self.model, self.args, self.kwargs, self.rows = model, args, kwargs, rows

    def arguments(self, indices) -> tuple[tuple, dict]:
        """The arguments, with these of the rows."""
        rows = {} if self.rows is None else jax.tree.map(lambda leaf: leaf[indices], self.rows)
        return self.args, {**self.kwargs, **rows}


class _Indexable(np.ndarray):
    """A NumPy array that traced indices can index; still concrete, as `int(group.max())` in a model needs."""

    array: Array | None = None

    def __getitem__(self, key):
        if any(isinstance(part, jax.Array) for part in (key if isinstance(key, tuple) else (key,))):
            return (jnp.asarray(np.asarray(self)) if self.array is None else self.array)[key]
        return super().__getitem__(key)


def _indexable(leaf):
    if type(leaf) is not np.ndarray or leaf.dtype.kind not in "biuf":
        return leaf
    indexable = leaf.view(_Indexable)
    indexable.array = jnp.asarray(leaf)
    return indexable


class _Plate(NamedTuple):
    size: int
    subsample_size: int | None


class _Plates(Messenger):
    """Gives the data plate these indices and other plates all of theirs, without the scale of N / batch."""

    def __init__(self, fn: Callable, plate: str | None, indices):
        super().__init__(fn)
        self.plate, self.indices = plate, indices
        self.plates: dict[str, _Plate] = {}

    def process_message(self, msg):
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            self.plates[msg["name"]] = _Plate(size, subsample_size)
            msg["value"] = self.indices if msg["name"] == self.plate else jnp.arange(size)
            msg["args"] = (size, None)
        if msg["type"] == "sample" and self.plate in _frames(msg) and self.plate in self.plates:
            repeats = self.plates[self.plate].size / self.indices.shape[0]
            msg["scale"] = msg["scale"] / repeats if repeats != 1 else msg["scale"]


class _Site(NamedTuple):
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


class _Structure(NamedTuple):
    sites: dict[str, _Site]
    plates: dict[str, _Plate]

    @property
    def latents(self) -> dict[str, _Site]:
        return {name: site for name, site in self.sites.items() if site.is_latent}


def _frames(msg) -> dict[str, int]:
    return {frame.name: frame.dim for frame in msg.get("cond_indep_stack") or ()}


def _describe(msg, log_prob=None) -> _Site:
    shape, unconstrained_shape = jnp.shape(msg["value"]), None
    if msg["type"] == "sample" and not msg["is_observed"]:
        unconstrained_shape = biject_to(msg["fn"].support).inverse_shape(shape)
    return _Site(
        type=msg["type"],
        is_observed=bool(msg.get("is_observed")),
        shape=shape,
        unconstrained_shape=unconstrained_shape,
        log_prob_shape=None if log_prob is None else jnp.shape(log_prob),
        plates=_frames(msg),
        in_control_flow=msg.get("_control_flow_done", False),
    )


def _first(count: int, num_data: int) -> Array:
    """A few indices, spread over the data."""
    return jnp.asarray(np.linspace(0, num_data - 1, count).round().astype(int))


def _structure(call: _Call, plate: str | None, indices, seed: int = 0) -> _Structure:
    """The model's sites and plates, from an abstract run."""
    found = []

    def run(indices):
        model = handlers.substitute(handlers.seed(_Kinds(call.model), seed), substitute_fn=init_to_uniform)
        handler = _Plates(model, plate, indices)
        args, kwargs = call.arguments(indices)
        trace = handlers.trace(handler).get_trace(*args, **kwargs)
        sites = {name: _describe(msg) for name, msg in trace.items() if msg["type"] != "plate"}
        found.append(_Structure(sites, handler.plates))

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


def _run(call: _Call, plate: str | None, example, indices) -> "tuple[_Run, dict[str, _Site]]":
    """The jaxpr of (z, indices) -> log density and value of every site."""
    sites: dict[str, _Site] = {}

    def run(z, indices):
        model = handlers.substitute(call.model, substitute_fn=partial(_unconstrained, z))
        args, kwargs = call.arguments(indices)
        log_probs, trace = compute_log_probs(
            _Plates(model, plate, indices), args, kwargs, {}, sum_log_prob=False
        )
        for name, msg in trace.items():
            if msg["type"] in ("sample", "deterministic"):
                sites[name] = _describe(msg, log_probs.get(name))
        values = {name: jnp.asarray(trace[name]["value"]) for name in sites}
        return {"log_prob": jax.tree.map(jnp.sum, log_probs), "value": values}

    with _explained():
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(example, indices)
    slots = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jax.tree.leaves(shapes))))
    return _Run(_without_repeats(_inline(closed)), slots), sites


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


# What is refused -------------------------------------------------------------------------------------------


def _global_structure(call: _Call) -> _Structure:
    """The sites of the whole model, all of which must be of a kind the method serves."""
    indices = jnp.arange(1 if call.rows is None else _num_rows(call.rows))
    first, second = (_structure(call, None, indices, seed) for seed in (0, 1))
    changed = {name for name, _ in _shapes(first) ^ _shapes(second)}
    if changed:
        raise ValueError(
            f"Sites {sorted(changed)} change between two runs of the model (stochastic control flow). Let "
            "every run have the same sites with the same shapes."
        )
    return first


def _shapes(structure: _Structure) -> set:
    return {(name, (site.type, site.is_observed, site.shape)) for name, site in structure.sites.items()}


class _Kinds(Messenger):
    """Refuses statements of a kind that the method does not serve, before NumPyro runs them."""

    def process_message(self, msg):
        name = str(msg.get("name"))
        if msg["type"] == "prng_key":
            raise ValueError(
                "The model draws random numbers outside its latent sites (numpyro.prng_key, or a site hidden "
                "by handlers.block). Make them numpyro.sample sites or fix them before the model."
            )
        if msg["type"] in ("param", "mutable"):
            raise ValueError(
                f"Site '{name}' is a numpyro.{msg['type']} statement; only latent variables are inferred. "
                "Give it a prior with numpyro.sample, or pass its value as an argument."
            )
        if msg["type"] == "sample" and not msg["is_observed"]:
            _check_latent(name, msg["fn"], msg.get("_control_flow_done", False))


def _check_latent(name: str, distribution, in_control_flow: bool) -> None:
    support = distribution.support
    if in_control_flow:
        raise ValueError(
            f"Latent site '{name}' is inside a control flow primitive (scan or cond). Sample it outside, "
            "with its whole shape, and let the loop read its entries."
        )
    if support.is_discrete:
        raise ValueError(
            f"Latent site '{name}' is discrete. Enumeration is not supported: sum it out in the model, for "
            "example with dist.MixtureSameFamily."
        )
    if isinstance(distribution, dist.Delta):
        raise ValueError(f"Latent site '{name}' has a Delta distribution. Use numpyro.deterministic instead.")
    try:
        biject_to(support)
    except NotImplementedError as error:
        raise ValueError(
            f"Latent site '{name}' has the support {support}, for which NumPyro has no transform from the "
            "real line. Use handlers.reparam or another distribution."
        ) from error


def _data_plate(structure: _Structure, asked: str | None) -> str:
    """The plate that was asked for, or the only one it can be."""
    subsampled = [
        name for name, plate in structure.plates.items() if plate.subsample_size not in (None, plate.size)
    ]
    observed = {name for site in structure.sites.values() if site.is_observed for name in site.plates}
    local = {name for site in structure.latents.values() for name in site.plates}
    candidates = subsampled or sorted(observed - local)
    if asked is not None:
        candidates = [name for name in structure.plates if name == asked]
        if not candidates:
            raise ValueError(
                f"data_plate={asked!r} is not a plate of the model, which has {sorted(structure.plates)}."
            )
    if len(candidates) > 1:
        raise ValueError(
            f"More than one plate can be the data plate: {candidates}. Choose one, for example "
            f"data_plate={candidates[0]!r}."
        )
    if not candidates:
        latents = sorted(name for name, site in structure.latents.items() if observed & site.plates.keys())
        found = (
            f"Latent sites {latents} share the plates {sorted(observed)} (they are local). "
            if observed
            else ""
        )
        raise ValueError(
            f"The model has no plate that holds observed sites and no latent ones. {found}"
            "Put the observations in `with numpyro.plate(name, N) as idx`, or pass the arguments that hold "
            "the rows as data={'X': X, 'y': y}."
        )
    if candidates[0] not in structure.plates:
        raise ValueError(f"Plate '{candidates[0]}' was created outside the model. Create it inside.")
    if candidates[0] not in observed:
        raise ValueError(
            f"Plate '{candidates[0]}' holds no observed site. Choose the plate of the observations."
        )
    return candidates[0]


def _num_rows(rows: Any) -> int:
    sizes = {leaf.shape[0] if leaf.ndim else -1 for leaf in jax.tree.leaves(rows)}
    if len(sizes) != 1 or min(sizes) < 1:
        shapes = {name: jax.tree.map(jnp.shape, leaf) for name, leaf in rows.items()}
        raise ValueError(f"data must hold arrays with the same number of rows; it has shapes {shapes}.")
    return sizes.pop()


def _refuse_local_latents(full: _Structure, single: _Structure, plate: str | None) -> None:
    for name, site in full.latents.items():
        there = single.sites.get(name)
        if plate in site.plates or there is None or there.shape != site.shape:
            where = "grows with the rows of data" if plate is None else f"belongs to the data plate '{plate}'"
            raise ValueError(
                f"Latent site '{name}' {where}: it is local to a datum. Only global latent variables are "
                "supported: integrate it out, or sample it in a plate of groups outside and index it."
            )


class _Terms(NamedTuple):
    likelihood: list[str]
    prior: list[str]
    visible: list[str]


def _divide(run: "_Run", sites: dict[str, _Site], plate: str | None) -> _Terms:
    """The sites of the likelihood and of the prior, and those that are a function of z alone."""
    scored = [name for name, site in sites.items() if site.type == "sample"]
    moving = {name for name in scored if run.depends_on_index("log_prob", name)}
    if plate is None:
        inside = {name for name in moving if sites[name].is_observed and not _is_jacobian(name, sites)}
    else:
        inside = {name for name in scored if plate in sites[name].plates}
        _refuse_ignored_indices({name: sites[name] for name in scored if name in inside}, plate)
    if moving - inside:
        raise ValueError(
            f"Sites {sorted(moving - inside)} depend on the data's rows but are not part of the "
            "likelihood (latent, or outside the data plate). Move them into the plate, or compute them from "
            "whole arrays."
        )
    if not moving:
        place = "data" if plate is None else f"the indices of plate '{plate}'"
        raise ValueError(
            f"No observed site depends on {place}. Index the observations, for example obs=y[idx] in "
            "`with numpyro.plate(name, N) as idx`."
        )
    visible = [
        name
        for name, site in sites.items()
        if (site.is_latent or site.type == "deterministic" and plate not in site.plates)
        and not run.depends_on_index("value", name)
    ]
    return _Terms([n for n in scored if n in inside], [n for n in scored if n not in inside], visible)


def _is_jacobian(name: str, sites: dict[str, _Site]) -> bool:
    return name.startswith("_") and name.endswith("_log_det") and name[1 : -len("_log_det")] in sites


def _refuse_ignored_indices(inside: dict[str, _Site], plate: str) -> None:
    for name, site in inside.items():
        if site.in_control_flow:
            raise ValueError(
                f"Site '{name}' is in the data plate '{plate}' inside a scan. Take the plate out of it."
            )
        shape, dim = site.log_prob_shape or (), site.plates[plate]
        length = shape[dim] if len(shape) >= -dim else 1
        if length != 1:
            raise ValueError(
                f"Site '{name}' ignores the indices of plate '{plate}': for 1 index it has {length} rows, so "
                "that subsampling would inflate its likelihood. Index its arguments (`with "
                f"numpyro.plate('{plate}', N) as idx`, X[idx], obs=y[idx]), use numpyro.subsample, or pass "
                "the arguments as data={'X': X, 'y': y}."
            )


def _refuse_coupled_rows(traced: NumPyroModel) -> None:
    """A few rows together must have the log density of the same rows one by one."""
    indices = _first(min(3, traced.num_data), traced.num_data)
    try:
        run, _ = _run(traced.call, traced.data_plate, traced.example, indices)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"The model runs with 1 datum but not with {len(indices)}. A plate whose size is written into "
            f"the model needs its indices; NumPyro says: {error}"
        ) from error
    together = run.program("log_prob", traced.likelihood_sites)
    keys = jax.random.split(jax.random.key(0), len(traced.example))
    z = {
        name: 0.1 * jax.random.normal(key, traced.example[name].shape)
        for name, key in zip(traced.example, keys, strict=True)
    }

    @eqx.filter_jit
    def compare(together, traced, z):
        terms = traced.log_likelihood_by_site(z, indices)
        joint = together(z, indices)
        return {name: (jnp.sum(term), joint[name], jnp.sum(jnp.abs(term))) for name, term in terms.items()}

    for name, (apart, joint, size) in compare(together, traced, z).items():
        tolerance = np.sqrt(np.finfo(apart.dtype).eps) * (1 + size)
        if np.isfinite(apart) and np.isfinite(joint) and abs(apart - joint) > tolerance:
            raise ValueError(
                f"Site '{name}' couples its rows: {len(indices)} rows have the log density {joint:.6g} "
                f"together and {apart:.6g} one by one. Compute what spans rows (means, scales by the "
                "batch size) outside the model, from all data."
            )


# Taking the jaxpr apart ------------------------------------------------------------------------------------


class Program(eqx.Module):
    """A part of a jaxpr as a function of its inputs; its constants are leaves."""

    jaxpr: Jaxpr = eqx.field(static=True)
    names: tuple[str, ...] = eqx.field(static=True)
    constants: list[Array]

    def __call__(self, *inputs) -> dict[str, Array]:
        outputs = eval_jaxpr(self.jaxpr, self.constants, *jax.tree.leaves(inputs))
        return dict(zip(self.names, outputs, strict=True))


def _variables(atoms: Iterable) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _reached(equations: Iterable[JaxprEqn], start: Iterable[Var]) -> set[Var]:
    """Everything that depends on `start`."""
    reached = set(start)
    for equation in equations:
        if not reached.isdisjoint(_variables(equation.invars)):
            reached.update(equation.outvars)
    return reached


def _needed(equations: Sequence[JaxprEqn], outputs: Iterable, given: Iterable[Var] = ()) -> list[JaxprEqn]:
    """The equations that lead from `given` to `outputs`."""
    given = set(given)
    wanted = set(_variables(outputs)) - given
    kept = []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            kept.append(equation)
            wanted.update(set(_variables(equation.invars)) - given)
    return kept[::-1]


def _inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr without calls of jit, inside which data and z would be out of sight."""

    def evaluate(jaxpr, constants, inputs):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))
        for equation in jaxpr.eqns:
            operands = [atom.val if isinstance(atom, Literal) else values[atom] for atom in equation.invars]
            if equation.primitive is jit_p:
                inner = equation.params["jaxpr"]
                outputs = evaluate(inner.jaxpr, inner.consts, operands)
            else:
                params = equation.primitive.get_bind_params(equation.params)
                outputs = equation.primitive.bind(*operands, **params)
                outputs = outputs if equation.primitive.multiple_results else [outputs]
            values.update(zip(equation.outvars, outputs, strict=True))
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]

    return jax.make_jaxpr(lambda *inputs: evaluate(closed.jaxpr, closed.consts, inputs))(*closed.in_avals)


def _without_repeats(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr with equal equations merged: a model may write X[idx] twice, the data hold it once."""
    same: dict[Var, Var] = {}
    seen: dict[Any, Any] = {}
    kept = []

    def resolve(atom):
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        same[variable] = seen.setdefault(id(value), variable)
    for equation in closed.jaxpr.eqns:
        equation = equation.replace(invars=[resolve(atom) for atom in equation.invars])
        operands = tuple((str(a.aval), str(a.val)) if isinstance(a, Literal) else a for a in equation.invars)
        key = (equation.primitive, operands, tuple(sorted(equation.params.items(), key=lambda item: item[0])))
        if equation.effects or not _is_hashable(key):
            kept.append(equation)
        elif key in seen:
            same.update(zip(equation.outvars, seen[key], strict=True))
        else:
            seen[key] = equation.outvars
            kept.append(equation)
    outputs = [resolve(atom) for atom in closed.jaxpr.outvars]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=kept, outvars=outputs), closed.consts)


def _is_hashable(key) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


class _Run(NamedTuple):
    """The jaxpr of one run, (z, indices) -> outputs, with the position of each site's outputs."""

    closed: ClosedJaxpr
    slots: dict[str, dict[str, int]]

    @property
    def _index(self) -> Var:
        return self.closed.jaxpr.invars[-1]

    @property
    def _latents(self) -> list[Var]:
        return self.closed.jaxpr.invars[:-1]

    def _outputs(self, group: str, names: Iterable[str]) -> list:
        return [self.closed.jaxpr.outvars[self.slots[group][name]] for name in names]

    def depends_on_index(self, group: str, name: str) -> bool:
        reached = _reached(self.closed.jaxpr.eqns, [self._index])
        return not reached.isdisjoint(_variables(self._outputs(group, [name])))

    def program(self, group: str, names: Sequence[str]) -> Program:
        """These outputs as a function of z and the indices."""
        return self._part(self.closed.jaxpr.invars, {}, self._outputs(group, names), names)

    def split(self, group: str, names: Sequence[str], num_data: int) -> tuple[Program, list[Var]]:
        """These outputs as a function of z and of row values, and which values of the run those are."""
        jaxpr, outputs = self.closed.jaxpr, self._outputs(group, names)
        equations = _needed(jaxpr.eqns, outputs)
        by_z, by_index = _reached(jaxpr.eqns, self._latents), _reached(jaxpr.eqns, [self._index])
        uses = [_variables(outputs)] + [
            _variables(e.invars) for e in equations if not by_z.isdisjoint(e.outvars)
        ]
        known = [e for e in equations if by_z.isdisjoint(e.outvars)]
        inputs = [self._index, *jaxpr.constvars]
        values = [*inputs, *(variable for equation in known for variable in equation.outvars)]
        # A row value is stored N times, a constant once; twice its size makes rows win where it is a tie. The
        # eight bytes that every value costs besides keep the values few.
        price = {v: (_num_bytes(v) + 8) * (num_data if v in by_index else 2) for v in values}
        cut = _minimum_cut(known, inputs, {v for use in uses for v in use} - by_z, price)
        rows = [v for v in cut if v in by_index]
        constants = self._constants([v for v in cut if v not in by_index])
        return self._part([*self._latents, *rows], constants, outputs, names), rows

    def rows(self, variables: list[Var], num_data: int) -> tuple[Array, ...]:
        """These values for every index, stacked."""
        by_index = _reached(self.closed.jaxpr.eqns, [self._index])
        equations = [
            e for e in _needed(self.closed.jaxpr.eqns, variables) if not by_index.isdisjoint(e.outvars)
        ]
        fixed = {v for e in equations for v in _variables(e.invars)} - by_index
        names = [str(number) for number in range(len(variables))]
        one = self._part([self._index], self._constants(fixed), variables, names)

        @eqx.filter_jit
        def stack(one, indices):
            return jax.lax.map(lambda index: one(index[None]), indices, batch_size=min(num_data, 4096))

        stacked = stack(one, jnp.arange(num_data, dtype=self._index.aval.dtype))  # type: ignore[attr-defined]
        return tuple(stacked[name] for name in names)

    def _constants(self, variables: Iterable[Var]) -> dict[Var, Array]:
        variables = list(variables)
        names = [str(number) for number in range(len(variables))]
        values = eqx.filter_jit(self._part([], {}, variables, names))()
        return dict(zip(variables, (values[name] for name in names), strict=True))

    def _part(self, inputs: Sequence[Var], constants: dict[Var, Array], outputs: list, names) -> Program:
        """The program from these inputs, with these values known, to these outputs."""
        jaxpr = self.closed.jaxpr
        equations = _needed(jaxpr.eqns, outputs, [*inputs, *constants])
        used = {v for e in equations for v in _variables(e.invars)} | set(_variables(outputs))
        known = dict(zip(jaxpr.constvars, self.closed.consts, strict=True)) | constants
        known = {v: value for v, value in known.items() if v in used and v not in inputs}
        part = jaxpr.replace(constvars=list(known), invars=list(inputs), outvars=outputs, eqns=equations)
        return Program(part, tuple(names), [jnp.asarray(value) for value in known.values()])


def _num_bytes(variable: Var) -> int:
    aval: Any = variable.aval
    return aval.size * getattr(aval.dtype, "itemsize", 8)


def _minimum_cut(
    equations: list[JaxprEqn], sources: Iterable[Var], sinks: Iterable[Var], price: dict[Var, int]
) -> list[Var]:
    """The values of least total price that every way from sources to sinks passes, close to the sinks.

    Every value is an edge of a network (from its "in" to its "out") whose capacity is its price; augmenting
    paths (Edmonds and Karp) fill it.
    """
    unlimited = sum(price.values()) + 1
    room: dict[Any, dict[Any, int]] = defaultdict(dict)

    def connect(start, end, capacity):
        room[start][end] = capacity
        room[end].setdefault(start, 0)

    for variable, cost in price.items():
        connect(("in", variable), ("out", variable), cost)
    for equation in equations:
        for operand in _variables(equation.invars):
            for result in equation.outvars:
                connect(("out", operand), ("in", result), unlimited)
    for variable in sources:
        connect("source", ("in", variable), unlimited)
    for variable in sinks:
        connect(("out", variable), "sink", unlimited)
    while "sink" in (parents := _parents(room, "source", lambda start, end: room[start][end])):
        path, node = [], "sink"
        while node != "source":
            path.append((parents[node], node))
            node = parents[node]
        flow = min(room[start][end] for start, end in path)
        for start, end in path:
            room[start][end] -= flow
            room[end][start] += flow
    downstream = _parents(room, "sink", lambda start, end: room[end][start])
    return [v for v in price if ("out", v) in downstream and ("in", v) not in downstream]


def _parents(room: dict, start, space: Callable[[Any, Any], int]) -> dict:
    """Breadth first: the nodes reached from `start` where there is space, and where each was reached from."""
    parents, queue = {start: None}, deque([start])
    while queue:
        node = queue.popleft()
        for other in room[node]:
            if other not in parents and space(node, other) > 0:
                parents[other] = node
                queue.append(other)
    return parents
