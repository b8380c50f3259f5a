"""Small random models: linear maps in a row, a reduction, an element-wise loss, in random nests of jit and vmap."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

LINEAR_STEPS = {
    "dense": lambda v, x: jnp.outer(x[: v.size], jnp.ones(v.size)) @ v,
    "reverse": lambda v, x: jnp.flip(v),
    "cumsum": lambda v, x: jnp.cumsum(v),
    "scale": lambda v, x: v * x[0] / 1.7 - x[1],
    "neighbours": lambda v, x: v - jnp.roll(v, 1),
    "tail": lambda v, x: v[1:] if v.size > 2 else v,
    "fold": lambda v, x: jnp.einsum("ij,i->j", v.reshape(2, -1), x[:2]) if v.size % 2 == 0 else v,
    "gather": lambda v, x: v[jnp.array([0, -1])],
    "data_gather": lambda v, x: v[jnp.argsort(x)[: v.size] % v.size],
    "select": lambda v, x: jnp.where(x[: v.size] > 0, v, 2 * v[::-1]),
    "add_axis": lambda v, x: jnp.sum(v[:, None] * x[None, :3], axis=1),
    "vmap": lambda v, x: jax.vmap(lambda a, b: a * b + 1.0)(v, x[: v.size]),
}
REDUCTIONS = [
    lambda v, x: v @ x[: v.size],
    lambda v, x: v[-1:],
    lambda v, x: v[jnp.argmax(x[: v.size])],
    lambda v, x: jnp.stack([v.sum(), v[0]]),
]
LOSSES = [jnp.exp, jnp.sin, jax.nn.softplus, jnp.square, lambda eta: 0.3 * eta, jax.nn.relu]
WRAPPERS = [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.vmap(f, in_axes=(0, None))]


class RandomModel(NamedTuple):
    """A function of (z, x), z with `dim` entries and x with six."""

    steps: Sequence[str]
    reduction: Callable
    loss: Callable
    wrapper: Callable

    @property
    def dim(self) -> int:
        return 12 if self._batched else 6

    @property
    def _batched(self) -> bool:
        return self.wrapper is WRAPPERS[-1]

    def __call__(self, z, x):
        return jnp.sum(self.wrapper(self._forward)(z.reshape(2, 6) if self._batched else z, x))

    def _forward(self, v, x):
        for step in self.steps:
            v = LINEAR_STEPS[step](v, x)
        return jnp.sum(self.loss(self.reduction(v, x)))


MODELS = st.builds(
    RandomModel,
    steps=st.lists(st.sampled_from(sorted(LINEAR_STEPS)), min_size=1, max_size=4),
    reduction=st.sampled_from(REDUCTIONS),
    loss=st.sampled_from(LOSSES),
    wrapper=st.sampled_from(WRAPPERS),
)
