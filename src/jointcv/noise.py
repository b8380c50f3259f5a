"""How ε enters K_n(z) = −N log p(x_n | z), and the approximation f~ whose mean over ε is closed.

    parameter   z = μ + σ⊙ε                   f~: ∇K_n(m_n) + ∇²K_n(m_n) v,   v = σ⊙ε
    predictor   η_n = A_n μ + b_n + s_n ξ_n   the same in η_n, with dη_n = s_n ξ_n and s_n² = A_n² σ²
    quadrature  E over η_n ~ N(A_n μ + b_n, s_n²) by Gauss–Hermite: f~ = f, and no noise is left

What is remembered of a datum is m_n as the view shows it, η_n = A_n m_n + b_n; v has the *current* σ, so that the
mean of f~ is G in the location and σ²⊙d in log σ, with G and d running means over the data:

    G = (1/N) Σ_j ∇K_j(m_j),   d = (1/N) Σ_j diag ∇²K_j(m_j)
"""

from abc import abstractmethod
from functools import lru_cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree, Scalar

from jointcv.checks import check_count
from jointcv.family import MeanFieldParams
from jointcv.view import AbstractView, LinearView, Seen

MOST_NODES = 150  # of twice as many the weights are still finite

Entry = PyTree[Array]
Draws = PyTree[Array]


class Summary(eqx.Module):
    """What a running mean over the data keeps: G, and d where the view has it; or both as a batch sees them.

    Neither is there where no mean is kept.
    """

    gradient: Seen | None
    curvature: Seen | None


class Pair(eqx.Module):
    """A gradient of the data term as the batch sees it, before `pull`: what is for μ and what for log σ."""

    location: Seen
    log_scale: Seen


class AbstractNoise(eqx.Module):
    """f and f~ of the data term under one kind of noise. `entry` is what is remembered of each datum of a batch."""

    @abstractmethod
    def draw(self, key: Key[Array, ""], view: AbstractView, data: PyTree[Array], part) -> Draws:
        """ε for a batch; `part` numbers the batches that share one z."""

    @abstractmethod
    def remember(self, view: AbstractView, params: MeanFieldParams, data: PyTree[Array]) -> Entry:
        """What must be kept of a visit at these parameters."""

    @abstractmethod
    def value(self, view, entry: Entry, params: MeanFieldParams, data, weights, draws: Draws) -> Scalar:
        """Σ w_n K_n."""

    @abstractmethod
    def gradient(self, view, entry: Entry, params: MeanFieldParams, data, weights, draws: Draws) -> Pair:
        """The gradient of Σ w_n K_n at the remembered places, with this noise."""

    @abstractmethod
    def sampled(self, view, entry: Entry, params: MeanFieldParams, data, weights, draws: Draws) -> Pair:
        """The gradient of Σ w_n f~_n at the remembered places, with this noise."""

    @abstractmethod
    def pull_both(
        self, view, pair: Pair, digest: Summary, params: MeanFieldParams, data, draws: Draws
    ) -> tuple[MeanFieldParams, Summary]:
        """The gradient that a pair and the summary that a digest stands for; linear in both."""

    @abstractmethod
    def excess(self, view, params: MeanFieldParams, data, weights, draws: Draws) -> Float[Array, " dim"]:
        """E diag Σ w_n ∇²K_n less the d of these parameters (0 where there is none), with this noise."""

    @abstractmethod
    def bend(self, view, entry: Entry, data, weights, step: Seen) -> Seen:
        """Σ w_n ∇²K_n along a step in η at the remembered places, or its mean where that is known; a cotangent."""

    @abstractmethod
    def digest(self, view, entry: Entry, data, weights) -> Summary:
        """What the mean of f~ over ε depends on, as the batch sees it."""

    def pull(self, view, pair: Pair, params: MeanFieldParams, data, draws: Draws) -> MeanFieldParams:
        """The gradient that a pair stands for; linear in it."""
        return self.pull_both(view, pair, Summary(None, None), params, data, draws)[0]

    def gather(self, view, digest: Summary, data) -> Summary:
        """The summary that a digest stands for; linear in it."""
        return Summary(view.pull(digest.gradient, data), view.pull_squared(digest.curvature, data))

    def expected(self, summary: Summary, params: MeanFieldParams) -> MeanFieldParams:
        """The gradient of E f~: (G, σ²⊙d), and nothing for log σ where d is not to be had."""
        if summary.curvature is None:
            return MeanFieldParams(summary.gradient, jnp.zeros_like(params.log_scale))  # pyright: ignore
        return MeanFieldParams(summary.gradient, params.variance * summary.curvature)  # pyright: ignore


class ParameterNoise(AbstractNoise):
    """One ε for the whole z, as in the paper, for any view. v has the current σ."""

    def draw(self, key, view, data, part):
        return draw_latent(key, view)

    def remember(self, view, params, data):
        return view.look(params.location, data)

    def value(self, view, entry, params, data, weights, draws):
        return view.value(entry + view.push(params.scale * draws, data), data, weights)

    def gradient(self, view, entry, params, data, weights, draws):
        slope = view.slope(entry + view.push(params.scale * draws, data), data, weights)
        return Pair(slope, slope)

    def sampled(self, view, entry, params, data, weights, draws):
        slope, bend = view.expand(entry, view.push(params.scale * draws, data), data, weights)
        # Without d the mean of ∇²K v⊙v is not known, but that of ∇K⊙v is: zero.
        return Pair(slope + bend, slope + bend if has_curvature(view) else slope)

    def pull_both(self, view, pair, digest, params, data, draws):
        pair, change = view.pull((pair, digest.gradient), data)
        bend = view.pull_squared(digest.curvature, data)
        return MeanFieldParams(pair.location, pair.log_scale * (params.scale * draws)), Summary(change, bend)

    def excess(self, view, params, data, weights, draws):
        here = view.look(params.location, data)
        step = view.push(params.scale * draws, data)
        if has_curvature(view):
            return _missed_curvature(view, here, step, params, data, weights)
        change = view.slope(here + step, data, weights) - view.slope(here, data, weights)
        return view.pull(change, data) * draws / params.scale

    def bend(self, view, entry, data, weights, step):
        return view.expand(entry, step, data, weights)[1]

    def digest(self, view, entry, data, weights):
        return _digest(view, entry, data, weights)


class PaperNoise(AbstractNoise):
    """The paper's own form: σ^n is remembered with m_n, and v_n = σ^n⊙ε; log σ keeps its naive gradient.

    It needs a view of the whole z; `jointcv.elbo.fold_prior` puts the prior into the table as the paper does.
    """

    def draw(self, key, view, data, part):
        return draw_latent(key, view)

    def remember(self, view, params, data):
        return MeanFieldParams(view.look(params.location, data), view.look(params.log_scale, data))

    def value(self, view, entry, params, data, weights, draws):
        return view.value(entry.location + entry.scale * draws, data, weights)

    def gradient(self, view, entry, params, data, weights, draws):
        v = entry.scale * draws
        slope = view.slope(entry.location + v, data, weights)
        return Pair(slope, slope * v)

    def sampled(self, view, entry, params, data, weights, draws):
        slope, bend = view.expand(entry.location, entry.scale * draws, data, weights)
        return Pair(slope + bend, jnp.zeros_like(slope))

    def pull_both(self, view, pair, digest, params, data, draws):
        pair, change = view.pull((pair, digest.gradient), data)
        return MeanFieldParams(pair.location, pair.log_scale), Summary(change, None)

    def excess(self, view, params, data, weights, draws):
        return ParameterNoise().excess(view, params, data, weights, draws)

    def bend(self, view, entry, data, weights, step):
        return view.expand(entry.location, step, data, weights)[1]

    def digest(self, view, entry, data, weights):
        return Summary(view.slope(entry.location, data, weights), None)


class PredictorNoise(AbstractNoise):
    """Noise where it acts: ξ_n of K numbers for every datum, independent (local reparameterisation)."""

    def draw(self, key, view: LinearView, data, part):  # pyright: ignore
        rows = jax.tree.leaves(data)[0].shape[0]
        shape = (rows, view.num_predictors)
        return jax.random.normal(jax.random.fold_in(key, part), shape, view.problem.dtype)

    def remember(self, view, params, data):
        return view.look(params.location, data)

    def value(self, view, entry, params, data, weights, draws):
        return view.value(entry + _spread_scale(view, params, data) * draws, data, weights)

    def gradient(self, view, entry, params, data, weights, draws):
        slope = view.slope(entry + _spread_scale(view, params, data) * draws, data, weights)
        return Pair(slope, slope)

    def sampled(self, view, entry, params, data, weights, draws):
        slope, bend = view.expand(entry, _spread_scale(view, params, data) * draws, data, weights)
        return Pair(slope + bend, slope + bend)

    def pull_both(self, view, pair, digest, params, data, draws):
        # dη/dρ_i = A_i² σ_i² ξ/s; a predictor that does not vary (s = 0) has A = 0 in every coordinate.
        spread = pair.log_scale * _divide(draws, _spread_scale(view, params, data))
        location, change = view.pull((pair.location, digest.gradient), data)
        spread, bend = view.pull_squared((spread, digest.curvature), data)
        return MeanFieldParams(location, params.variance * spread), Summary(change, bend)

    def excess(self, view, params, data, weights, draws):
        here, step = view.look(params.location, data), _spread_scale(view, params, data) * draws
        return _missed_curvature(view, here, step, params, data, weights)

    def bend(self, view, entry, data, weights, step):
        return view.expand(entry, step, data, weights)[1]

    def digest(self, view, entry, data, weights):
        return _digest(view, entry, data, weights)


class Moments1D(eqx.Module):
    """a_n = E ℓ'_n and b_n = E ξ ℓ'_n / s_n = E ℓ''_n, weights left out: all that exact expectations remember."""

    slope: Float[Array, "batch predictors"]
    bend: Float[Array, "batch predictors"]


class Quadrature(AbstractNoise):
    """Expectations over a scalar predictor by Gauss–Hermite quadrature: f~ is f, and only subsampling is random.

    Args:
        nodes: how many. The only error is that of the quadrature; `jointcv.quadrature_error(fit)` tells it.
    """

    nodes: int = eqx.field(static=True, default=32)

    def __check_init__(self):
        nodes = check_count("Quadrature(nodes=...): nodes", self.nodes, "nodes")
        if nodes > MOST_NODES:
            raise ValueError(
                f"Quadrature(nodes={nodes}) is more than can be computed. Use at most {MOST_NODES}."
            )

    def draw(self, key, view, data, part):
        return None

    def remember(self, view, params, data):
        points, masses = self._rule(view)
        centre, scale = view.look(params.location, data), _spread_scale(view, params, data)
        ones = jnp.full(centre.shape[0], 1 / view.problem.num_data, centre.dtype)

        slopes = jax.vmap(lambda point: view.slope(centre + scale * point, data, ones))(points)
        # By parts: the derivative in s of the very sum that `value` is, and it sees kinks of ℓ, which ℓ'' does not.
        bend = jnp.tensordot(masses * points, slopes, 1)
        return Moments1D(jnp.tensordot(masses, slopes, 1), _divide(bend, scale))

    def value(self, view, entry, params, data, weights, draws):
        points, masses = self._rule(view)
        centre, scale = view.look(params.location, data), _spread_scale(view, params, data)
        return masses @ jax.vmap(lambda point: view.value(centre + scale * point, data, weights))(points)

    def gradient(self, view, entry, params, data, weights, draws):
        digest = self.digest(view, entry, data, weights)
        return Pair(digest.gradient, digest.curvature)  # pyright: ignore

    def sampled(self, view, entry, params, data, weights, draws):
        return self.gradient(view, entry, params, data, weights, draws)

    def pull_both(self, view, pair, digest, params, data, draws):
        location, change = view.pull((pair.location, digest.gradient), data)
        spread, bend = view.pull_squared((pair.log_scale, digest.curvature), data)
        return MeanFieldParams(location, params.variance * spread), Summary(change, bend)

    def excess(self, view, params, data, weights, draws):
        return jnp.zeros_like(params.location)

    def bend(self, view, entry, data, weights, step):
        return (view.problem.num_data * weights)[:, None] * entry.bend * step

    def digest(self, view, entry, data, weights):
        counts = (view.problem.num_data * weights)[:, None]
        return Summary(counts * entry.slope, counts * entry.bend)

    def _rule(self, view):
        points, masses = gauss_hermite(self.nodes)
        return jnp.asarray(points, view.problem.dtype), jnp.asarray(masses, view.problem.dtype)


@lru_cache
def gauss_hermite(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and masses with Σ masses h(points) ≈ E h(x), x standard normal."""
    points, masses = np.polynomial.hermite_e.hermegauss(nodes)
    return points, masses / masses.sum()


def draw_latent(key: Key[Array, ""], view: AbstractView) -> Float[Array, " dim"]:
    """ε for every coordinate of z."""
    return jax.random.normal(key, (view.problem.dim,), view.problem.dtype)


def has_curvature(view: AbstractView) -> bool:
    """Whether d is to be had."""
    return isinstance(view, LinearView) and view.has_squares


def _spread_scale(view, params: MeanFieldParams, data) -> Seen:
    return jnp.sqrt(view.spread(params.variance, data))


def _missed_curvature(view, here: Seen, step: Seen, params: MeanFieldParams, data, weights):
    """E diag Σ w_n ∇²K_n less that at the location, by parts: (A²)ᵀ [ℓ'(η + dη) − ℓ'(η) − ℓ''(η) dη] dη / s².

    The mean of ℓ''(η + dη) − ℓ''(η) is the same for smooth losses; of kinks, which ℓ'' does not see, it knows nothing.
    """
    slope, bend = view.expand(here, step, data, weights)
    missed = view.slope(here + step, data, weights) - slope - bend
    return view.pull_squared(_divide(missed * step, view.spread(params.variance, data)), data)


def _divide(numerator: Seen, spread: Seen) -> Seen:
    """0 for a predictor that does not vary, which has A = 0 in every coordinate."""
    return jnp.where(spread > 0, numerator / jnp.where(spread > 0, spread, 1), 0)


def _digest(view, entry, data, weights) -> Summary:
    bend = view.bend(entry, data, weights) if has_curvature(view) else None
    return Summary(view.slope(entry, data, weights), bend)
