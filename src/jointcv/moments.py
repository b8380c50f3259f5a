"""The expectation of a log density under z ~ N(m, diag s²), as far as it has a closed form:

    log p(z) = closed(z) + remainder(z)
    closed(z) = c + a·z + Σ_i w_i Π_k L_ik(z) exp(E_i(z)),    L, E affine
    E closed(z) = c + a·m + Σ_i w_i exp(E_i(m) + ½ V E_i) E' Π_k L_ik

where E' shifts the means of the L_ik by cov(L_ik, E_i) and leaves their covariances. A Gaussian prior is
closed, with fixed or latent scales; its gradient then carries no Monte Carlo noise.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Scalar
from scipy import sparse

from jointcv import moment_rules as rules

FEW = 4  # nonzeros a row that are looked up one by one
DENSE = 0.25  # the fraction of nonzeros from which a block is stored in full


class Lookup(eqx.Module):
    """coefficient ⊙ v[indices]; indices in regular steps are read as a slice."""

    coefficient: Array
    indices: Array | None
    bounds: tuple[int, int, int] = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, vector: Float[Array, " dim"]) -> Array:
        if self.indices is not None:
            return self.coefficient * vector[self.indices]
        start, stop, step = self.bounds
        return self.coefficient * jax.lax.slice(vector, (start,), (stop,), (step,)).reshape(self.shape)


class Block(eqx.Module):
    """A dense matrix on contiguous coordinates."""

    matrix: Array
    start: int = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, vector: Float[Array, " dim"]) -> Array:
        seen = jax.lax.slice(vector, (self.start,), (self.start + self.matrix.shape[1],))
        return jnp.dot(self.matrix, seen, precision="highest").reshape(self.shape)


class Rows(eqx.Module):
    """A sparse matrix, its rows padded to one length."""

    coefficient: Array
    indices: Array
    shape: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, vector: Float[Array, " dim"]) -> Array:
        return jnp.sum(self.coefficient * vector[self.indices], axis=-1).reshape(self.shape)


class Map(eqx.Module):
    """offset + A v, in an array whose axes are 1 long where it is constant along them."""

    offset: Array
    pieces: tuple[Lookup | Block | Rows, ...]

    def __call__(self, vector: Float[Array, " dim"]) -> Array:
        return sum((piece(vector) for piece in self.pieces), self.offset)


class ClosedTerm(eqx.Module):
    """Σ_i w_i Π_k L_ik(z) exp(E_i(z)); covariances that vanish are left out."""

    weights: Array
    factors: tuple[Map, ...]
    exponent: Map | None
    exponent_variance: Map | None
    tilts: dict[int, Map]  # cov(L_k, E)
    covariances: dict[tuple[int, int], Map]  # cov(L_j, L_k), j <= k
    order: tuple[int, ...] = eqx.field(static=True)  # the product's factors; a square names one twice
    shape: tuple[int, ...] = eqx.field(static=True)

    def expectation(self, location, variance) -> Scalar:
        means = [factor(location) for factor in self.factors]
        for k, tilt in self.tilts.items():
            means[k] = means[k] + tilt(variance)
        covariances = {pair: covariance(variance) for pair, covariance in self.covariances.items()}
        result = self.weights * _gaussian_product(self.order, means, covariances)
        if self.exponent is not None and self.exponent_variance is not None:
            result = result * jnp.exp(self.exponent(location) + 0.5 * self.exponent_variance(variance))
        return jnp.sum(jnp.broadcast_to(result, self.shape))


class Moments(eqx.Module):
    """A log density, split into what has a closed expectation and the remainder; made by `read_moments`."""

    affine: Map
    terms: tuple[ClosedTerm, ...]
    constants: tuple[Array, ...]
    jaxpr: Any = eqx.field(static=True)  # of the remainder
    touched_bits: bytes = eqx.field(static=True)
    dim: int = eqx.field(static=True)

    @property
    def is_complete(self) -> bool:
        """Whether there is no remainder."""
        return self.jaxpr is None

    @property
    def touched(self) -> Bool[np.ndarray, " dim"]:
        """The coordinates of z the remainder depends on."""
        return np.unpackbits(np.frombuffer(self.touched_bits, np.uint8), count=self.dim).astype(bool)

    def expectation(self, location: Float[Array, " dim"], variance: Float[Array, " dim"]) -> Scalar:
        """The expectation of the closed part under N(location, diag(variance)).

        Its derivative with respect to the variance is half the closed part's expected Hessian diagonal.
        """
        return self.affine(location) + sum(term.expectation(location, variance) for term in self.terms)

    def closed(self, z: Float[Array, " dim"]) -> Scalar:
        """The closed part at a point."""
        return self.expectation(z, jnp.zeros_like(z))

    def remainder(self, z: Float[Array, " dim"]) -> Scalar:
        """The rest at a point; to be averaged over draws."""
        if self.jaxpr is None:
            return jnp.zeros((), z.dtype)
        (value,) = jex.jaxpr_as_fun(jex.ClosedJaxpr(self.jaxpr, self.constants))(z)
        return value


def read_moments(function: Callable[[Float[Array, " dim"]], Scalar], z: Float[Array, " dim"]) -> Moments:
    """Find the part of a log density whose Gaussian expectation has a closed form.

    Always succeeds; what is not recognised goes to the remainder.

    Args:
        function: a scalar function of a flat z, without data to trace.
        z: an example of its argument.

    Returns:
        Moments with function(z) = closed(z) + remainder(z).

    Examples:
        >>> import jax.numpy as jnp
        >>> moments = read_moments(lambda z: -0.5 * jnp.sum(z**2), jnp.zeros(3))
        >>> moments.is_complete, float(moments.expectation(jnp.zeros(3), jnp.ones(3)))
        (True, -1.5)
    """
    z = jnp.asarray(z)
    closed, rest, touched = rules.read(jax.make_jaxpr(function)(z))
    remainder = None if rest is None else jax.make_jaxpr(lambda z: rules.run(rest, z))(z)
    lower = _Lowering(z.dtype)
    return Moments(
        affine=lower.affine(closed.affine, ()),
        terms=tuple(lower.term(term) for term in closed.terms if term.weights.nnz),
        constants=() if remainder is None else tuple(jnp.asarray(c) for c in remainder.consts),
        jaxpr=None if remainder is None else remainder.jaxpr,
        touched_bits=np.packbits(touched).tobytes(),
        dim=z.size,
    )


def verify_moments(moments: Moments, function, z: Float[Array, " dim"], key: PRNGKeyArray) -> str | None:
    """Check at random points that the parts add up, in value and gradient, and that `touched` holds.

    Returns:
        What is wrong, or None.
    """
    tolerance = 50 * float(jnp.finfo(z.dtype).eps) ** 0.75
    for draw in z + 0.5 * jax.random.normal(key, (3, z.size), z.dtype):
        (whole, gradient), (closed, closed_gradient), (rest, rest_gradient) = _at(moments, function, draw)
        if not jnp.isfinite(whole):
            continue
        if not abs(closed + rest - whole) <= tolerance * (1.0 + abs(closed) + abs(rest)):
            return f"closed {closed} + remainder {rest} is not the function's {whole}"
        gap = jnp.abs(closed_gradient + rest_gradient - gradient)
        scale = 1.0 + jnp.max(jnp.abs(closed_gradient)) + jnp.max(jnp.abs(rest_gradient))
        if not jnp.max(gap) <= tolerance * scale:
            return f"the gradients of the parts miss the function's by {jnp.max(gap)} in z[{jnp.argmax(gap)}]"
        if np.any(np.asarray(rest_gradient)[~moments.touched] != 0):
            return "the remainder depends on coordinates it does not name"
    return None


@eqx.filter_jit
def _at(moments: Moments, function, z):
    parts = (function, moments.closed, moments.remainder)
    return [jax.value_and_grad(part)(z) for part in parts]


def _gaussian_product(order: tuple[int, ...], means, covariances) -> Any:
    """E Π_k L_k by Stein's lemma: E L_1 g(L) = μ_1 E g + Σ_j cov(L_1, L_j) E ∂_j g."""
    if not order:
        return 1.0
    first, rest = order[0], order[1:]
    total = means[first] * _gaussian_product(rest, means, covariances)
    for i, other in enumerate(rest):
        pair = (min(first, other), max(first, other))
        if pair in covariances:
            others = rest[:i] + rest[i + 1 :]
            total = total + covariances[pair] * _gaussian_product(others, means, covariances)
    return total


# From sparse matrices to array operations.


class _Lowering:
    def __init__(self, dtype):
        self.dtype = dtype

    def array(self, values) -> Array:
        return jnp.asarray(values, self.dtype)

    def term(self, term: rules.Term) -> ClosedTerm:
        weights, product = _drop_unused(term)
        unique: list[rules.Affine] = []
        order = tuple(_find_or_append(unique, factor) for factor in product.factors)
        exponent, shape = product.exponent, product.shape
        pairs = {(i, j): (unique[i], unique[j]) for i in set(order) for j in set(order) if i <= j}
        return ClosedTerm(
            weights=self.array(_shrink(weights.reshape(shape))),
            factors=tuple(self.affine(factor, shape) for factor in unique),
            exponent=None if exponent is None else self.affine(exponent, shape),
            exponent_variance=None if exponent is None else self.covariance(exponent, exponent, shape),
            tilts={}
            if exponent is None
            else self.covariances({k: (factor, exponent) for k, factor in enumerate(unique)}, shape),
            covariances=self.covariances(pairs, shape),
            order=order,
            shape=shape,
        )

    def covariances(self, pairs: dict, shape) -> dict:
        maps = {key: self.covariance(left, right, shape) for key, (left, right) in pairs.items()}
        return {key: value for key, value in maps.items() if value.pieces}

    def covariance(self, left: rules.Affine, right: rules.Affine, shape) -> Map:
        """The map from s² to Σ_d A_id B_id s²_d."""
        products = sparse.csr_array(left.matrix.multiply(right.matrix))
        return self.affine(rules.Affine(np.zeros(left.offset.size), products), shape)

    def affine(self, affine: rules.Affine, shape) -> Map:
        offset = self.array(_shrink(affine.offset.reshape(shape)))
        return Map(offset, self.pieces(affine.matrix, shape))

    def pieces(self, matrix: sparse.csr_array, shape) -> tuple[Lookup | Block | Rows, ...]:
        matrix.sort_indices()
        if matrix.nnz == 0:
            return ()
        width = int(np.diff(matrix.indptr).max())
        start, stop = int(matrix.indices.min()), int(matrix.indices.max()) + 1
        if width > FEW and matrix.nnz >= DENSE * (matrix.indptr.size - 1) * (stop - start):
            return (Block(self.array(matrix[:, start:stop].toarray()), start, shape),)
        indices, coefficient = _padded(matrix, width)
        if width > FEW:
            return (Rows(self.array(coefficient), jnp.asarray(indices), shape),)
        columns = zip(indices.T.reshape(-1, *shape), coefficient.T.reshape(-1, *shape), strict=True)
        return tuple(self.lookup(_shrink(index), self.array(_shrink(scale))) for index, scale in columns)

    def lookup(self, indices: np.ndarray, coefficient: Array) -> Lookup:
        flat = indices.ravel()
        step = int(flat[1] - flat[0]) if flat.size > 1 else 1
        if step > 0 and (np.diff(flat) == step).all():
            bounds = int(flat[0]), int(flat[-1]) + 1, step
            return Lookup(coefficient, None, bounds, indices.shape)
        return Lookup(coefficient, jnp.asarray(indices), (0, 0, 1), indices.shape)


def _drop_unused(term: rules.Term) -> tuple[np.ndarray, rules.Product]:
    """Only the elements with a weight: 0 · exp(E) is not 0 where E overflows."""
    weights, product = np.asarray(term.weights.sum(axis=0)).ravel(), term.product
    used = (weights != 0).reshape(product.shape)
    if used.all():
        return weights, product
    axes = range(used.ndim)
    lines = [used.any(axis=tuple(other for other in axes if other != axis)) for axis in axes]
    box = used[np.ix_(*lines)]
    shape = box.shape if box.all() else (int(used.sum()),)
    rows = np.flatnonzero(used)
    return weights[rows], product.take(rows, shape)


def _find_or_append(known: list[rules.Affine], affine: rules.Affine) -> int:
    for i, other in enumerate(known):
        if other is affine or _same(other, affine):
            return i
    known.append(affine)
    return len(known) - 1


def _same(left: rules.Affine, right: rules.Affine) -> bool:
    if left.matrix.nnz != right.matrix.nnz or not np.array_equal(left.offset, right.offset):
        return False
    return bool(abs(left.matrix - right.matrix).max() == 0)


def _padded(matrix: sparse.csr_array, width: int) -> tuple[np.ndarray, np.ndarray]:
    counts = np.diff(matrix.indptr)
    rows = np.repeat(np.arange(counts.size), counts)
    places = np.arange(matrix.nnz) - np.repeat(matrix.indptr[:-1], counts)
    indices, coefficient = np.zeros((counts.size, width), np.int32), np.zeros((counts.size, width))
    indices[rows, places], coefficient[rows, places] = matrix.indices, matrix.data
    return indices, coefficient


def _shrink(values: np.ndarray | np.generic) -> np.ndarray:
    """Keep one of the entries along an axis on which they are all equal."""
    values = np.asarray(values)
    for axis in range(values.ndim):
        first = values.take([0], axis)
        if (values == first).all():
            values = first
    return values
