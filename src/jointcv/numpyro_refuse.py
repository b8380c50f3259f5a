"""What is refused of a NumPyro model, with the remedy.

Statements of a kind that the method does not serve, plates that cannot be the data plate, latent variables
that are local to a datum, and rows that do not add up.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions.transforms import biject_to
from numpyro.primitives import Messenger

from jointcv.numpyro_rows import Run
from jointcv.numpyro_run import Call, Site, Structure, few_indices, read_structure, trace_run


def global_structure(call: Call) -> Structure:
    """The sites of the whole model, all of which must be of a kind the method serves."""
    indices = jnp.arange(1 if call.rows is None else num_rows(call.rows))
    first, second = (served_structure(call, None, indices, seed) for seed in (0, 1))
    changed = {name for name, _ in _shapes(first) ^ _shapes(second)}
    if changed:
        raise ValueError(
            f"Sites {sorted(changed)} change between two runs of the model (stochastic control flow). Let "
            "every run have the same sites with the same shapes."
        )
    return first


def served_structure(call: Call, plate: str | None, indices, seed: int = 0) -> Structure:
    """The model's sites and plates; every statement must be of a kind the method serves."""
    return read_structure(call.inside(Kinds), plate, indices, seed)


def _shapes(structure: Structure) -> set:
    return {(name, (site.type, site.is_observed, site.shape)) for name, site in structure.sites.items()}


class Kinds(Messenger):
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
                "Give it a prior with numpyro.sample, or pass its value as an argument (centered=0 for a "
                "LocScaleReparam)."
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


def choose_data_plate(structure: Structure, asked: str | None) -> str:
    """The plate that was asked for, or the only one it can be."""
    subsampled = [
        name for name, plate in structure.plates.items() if plate.subsample_size not in (None, plate.size)
    ]
    observed = {name for site in structure.sites.values() if site.is_observed for name in site.plates}
    local = {name for site in structure.latents.values() for name in site.plates}
    data_plates = observed - local
    candidates = [name for name in subsampled if name in data_plates] or subsampled or sorted(data_plates)
    if not any(site.is_observed for site in structure.sites.values()):
        raise ValueError(
            "The model has no observed site. Pass it the data, so that a numpyro.sample statement has obs=y[idx]."
        )
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
            "the rows to jointcv.from_numpyro as data={'X': X, 'y': y}."
        )
    if candidates[0] not in structure.plates:
        raise ValueError(f"Plate '{candidates[0]}' was created outside the model. Create it inside.")
    if candidates[0] not in observed:
        raise ValueError(
            f"Plate '{candidates[0]}' holds no observed site. Choose the plate of the observations."
        )
    return candidates[0]


def num_rows(rows: Any) -> int:
    sizes = {leaf.shape[0] if leaf.ndim else -1 for leaf in jax.tree.leaves(rows)}
    if len(sizes) != 1 or min(sizes) < 1:
        shapes = {name: jax.tree.map(jnp.shape, leaf) for name, leaf in rows.items()}
        raise ValueError(
            f"data must hold arrays with the same number of rows; it has shapes {str(shapes)[:200]}. Pass arrays "
            "with one row a datum, np.asarray of a list."
        )
    return sizes.pop()


def refuse_local_latents(full: Structure, single: Structure, plate: str | None) -> None:
    for name, site in full.latents.items():
        there = single.sites.get(name)
        if plate in site.plates or there is None or there.shape != site.shape:
            where = "grows with the rows of data" if plate is None else f"belongs to the data plate '{plate}'"
            raise ValueError(
                f"Latent site '{name}' {where}: it is local to a datum. Only global latent variables are "
                "supported: integrate it out, or sample it in a plate of groups outside and index it."
            )


class Terms(NamedTuple):
    likelihood: list[str]
    prior: list[str]
    visible: list[str]


def divide(run: Run, sites: dict[str, Site], plate: str | None) -> Terms:
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
    return Terms([n for n in scored if n in inside], [n for n in scored if n not in inside], visible)


def _is_jacobian(name: str, sites: dict[str, Site]) -> bool:
    return name.startswith("_") and name.endswith("_log_det") and name[1 : -len("_log_det")] in sites


def _refuse_ignored_indices(inside: dict[str, Site], plate: str) -> None:
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
                "the arguments to jointcv.from_numpyro as data={'X': X, 'y': y}."
            )


def refuse_coupled_rows(
    by_site: Callable,
    call: Call,
    plate: str | None,
    num_data: int,
    example: dict[str, Array],
    likelihood_sites: Sequence[str],
) -> None:
    """A few rows together must have the log density of the same rows one by one.

    Args:
        by_site: from z and indices to the log densities of these data one by one, by site name.
        call: the model.
        plate: its data plate.
        num_data: how many rows there are.
        example: unconstrained values by site name.
        likelihood_sites: the sites that `by_site` gives.
    """
    indices = few_indices(min(3, num_data), num_data)
    try:
        run, _ = trace_run(call, plate, example, indices)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"The model runs with 1 datum but not with {len(indices)}. A plate whose size is written into "
            f"the model needs its indices; NumPyro says: {error}"
        ) from error
    keys = jax.random.split(jax.random.key(0), len(example))
    z = {
        name: 0.1 * jax.random.normal(key, example[name].shape)
        for name, key in zip(example, keys, strict=True)
    }
    together = run.program("log_prob", likelihood_sites)

    @eqx.filter_jit
    def compare(together, by_site, z):
        terms = by_site(z, indices)
        joint = together(z, indices)
        return {name: (jnp.sum(term), joint[name], jnp.sum(jnp.abs(term))) for name, term in terms.items()}

    for name, (apart, joint, size) in compare(together, by_site, z).items():
        tolerance = np.sqrt(np.finfo(apart.dtype).eps) * (1 + size)
        if np.isfinite(apart) and np.isfinite(joint) and abs(apart - joint) > tolerance:
            raise ValueError(
                f"Site '{name}' couples its rows: {len(indices)} rows have the log density {joint:.6g} "
                f"together and {apart:.6g} one by one. Compute what spans rows (means, scales by the "
                "batch size) outside the model, from all data."
            )
