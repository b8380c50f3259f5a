"""A NumPyro model as a problem: log p(z) and log p(x_n | z), read from one run of the model.

The model is run once, abstractly, with the data plate's indices replaced by a single symbolic index
(`numpyro_run`); the jaxpr is taken apart into rows of data, constants, and what z acts on (`numpyro_rows`).
What would not give the model's own posterior is refused (`numpyro_refuse`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Scalar
from numpyro import handlers
from numpyro.infer import Predictive

from jointcv.checks import check_type
from jointcv.numpyro_refuse import (
    choose_data_plate,
    divide,
    global_structure,
    num_rows,
    refuse_coupled_rows,
    refuse_local_latents,
    served_structure,
)
from jointcv.numpyro_rows import Program
from jointcv.numpyro_run import Call, Plates, few_indices, indexable, trace_run
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

    Examples:
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
    check_type("model", model, Callable, "Pass a function of NumPyro statements.")
    check_type(
        "data", data, dict | None, "Pass the arguments that hold the rows by name: data={'X': X, 'y': y}."
    )
    if data is not None and data_plate is not None:
        raise ValueError(
            f"data_plate={data_plate!r} and data were both given. Pass data= for a model whose arguments "
            "hold the rows, or data_plate= for one that indexes its plate."
        )
    rows = None if data is None else jax.tree.map(jnp.asarray, data)
    call = Call(model, jax.tree.map(indexable, args), jax.tree.map(indexable, kwargs), rows)
    full = global_structure(call)
    plate = choose_data_plate(full, data_plate) if rows is None else None
    num_data = full.plates[plate].size if plate is not None else num_rows(rows)
    single = served_structure(call, plate, few_indices(1, num_data))
    refuse_local_latents(full, single, plate)
    example = {name: jnp.zeros(site.unconstrained_shape) for name, site in full.latents.items()}
    if not example:
        raise ValueError(
            "The model has no latent site. Give at least one quantity a numpyro.sample statement."
        )
    run, sites = trace_run(call, plate, example, few_indices(1, num_data))
    terms = divide(run, sites, plate)
    likelihood, rows_of_all = run.split_rows("log_prob", terms.likelihood, num_data)
    prior, _ = run.split("log_prob", terms.prior, num_data)
    values, _ = run.split("value", terms.visible, num_data)
    traced = NumPyroModel(
        call=call,
        data_plate=plate,
        subsample_size=None if plate is None else full.plates[plate].subsample_size,
        num_data=num_data,
        latent_sites=tuple(full.latents),
        likelihood_sites=tuple(terms.likelihood),
        prior_sites=tuple(terms.prior),
        observed_sites=tuple(name for name, site in sites.items() if site.is_observed and not site.is_factor),
        log_prior=SumOfSites(prior),
        log_likelihood=SumOfSites(likelihood),
        constrain=Constrain(values),
        data=rows_of_all,
        example=example,
    )
    refuse_coupled_rows(traced.log_likelihood_by_site, call, plate, num_data, example, terms.likelihood)
    return traced


class SumOfSites(eqx.Module):
    """A log density: the sum of the log densities of its sites."""

    by_site: Program

    def __call__(self, *inputs) -> Scalar:
        return sum(self.by_site(*inputs).values(), start=jnp.zeros(()))


class Constrain(eqx.Module):
    """Latent and global deterministic sites by name, from unconstrained z."""

    by_site: Program

    def __call__(self, z) -> dict[str, Array]:
        return self.by_site(z)


class NumPyroModel(eqx.Module):
    """A traced NumPyro model: the parts of its problem, and the model for what needs it again."""

    call: Call = eqx.field(static=True)
    data_plate: str | None = eqx.field(static=True)
    subsample_size: int | None = eqx.field(static=True)
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
            origin=self,
        )

    def log_likelihood_by_site(self, z: PyTree[Array], indices) -> dict[str, Array]:
        """log p(x_n | z) of the data with these indices, for every site (and factor) in the plate."""
        rows = jax.tree.map(lambda leaf: leaf[jnp.asarray(indices)], self.data)
        return jax.vmap(partial(self.log_likelihood.by_site, z))(rows)

    def observed(self) -> dict[str, Array]:
        """The observed values by site name, all rows, shaped as the model has them."""
        indices = jnp.arange(self.num_data)
        run, _ = trace_run(self.call, self.data_plate, self.example, indices)
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
        model = Plates(handlers.uncondition(self.call.model), None, None)
        args, kwargs = self.call.arguments(jnp.arange(self.num_data))
        names = list(self.observed_sites if sites is None else sites)
        return Predictive(model, latent, return_sites=names)(key, *args, **kwargs)
