"""An objective E_n E_ε f(w; n, ε) with an approximation f~ whose mean over ε is closed.

This is all that controls, memories and algorithms know. `entry` is what is remembered of a batch's data: f and f~
are taken at the remembered place, so that the current place is `remember(params, data)` like any other.

Gradients stay *cotangents* while they are added up: pytrees of one structure, linear in the gradient, which `pull`
turns into a gradient once a step. Where a datum sees z through K numbers, a cotangent has K numbers a datum.
"""

from abc import abstractmethod
from typing import Any

import equinox as eqx
from jaxtyping import Array, Bool, Float, Key, PyTree, Scalar

Params = Any
Entry = PyTree[Array]
Draws = PyTree[Array]
Summary = PyTree[Array]
Cotangent = PyTree[Array]
Weights = Float[Array, " batch"]


class AbstractObjective(eqx.Module):
    """f(w; n, ε), f~, and how ε is drawn. Sums over a batch carry the weights of its data."""

    data: eqx.AbstractVar[PyTree[Array]]
    num_data: eqx.AbstractVar[int]

    @abstractmethod
    def init(self, key: Key[Array, ""]) -> Params:
        """Where a run starts."""

    @abstractmethod
    def admits(self, params: Params) -> Bool[Scalar, ""]:
        """Whether a run may go on from these parameters; they are finite and so is all that is made of them."""

    @abstractmethod
    def draw(self, key: Key[Array, ""], params: Params, data: PyTree[Array], part: int = 0) -> Draws:
        """ε for a step. Batches of one pass over the data share a key and differ in `part`."""

    @abstractmethod
    def remember(self, params: Params, data: PyTree[Array]) -> Entry:
        """What must be kept of a visit to these data at these parameters."""

    @abstractmethod
    def value(
        self, entry: Entry, params: Params, data: PyTree[Array], weights: Weights, draws: Draws
    ) -> Scalar:
        """The part of Σ w_n f_n that depends on the data."""

    @abstractmethod
    def rest(self, params: Params, draws: Draws) -> Scalar:
        """The part of f that does not: prior and entropy, or a regulariser."""

    @abstractmethod
    def gradient(
        self, entry: Entry, params: Params, data: PyTree[Array], weights: Weights, draws: Draws
    ) -> Cotangent:
        """Σ w_n ∇f_n."""

    @abstractmethod
    def sampled(
        self, entry: Entry, params: Params, data: PyTree[Array], weights: Weights, draws: Draws
    ) -> Cotangent:
        """Σ w_n ∇f~_n."""

    @abstractmethod
    def summarise(self, entry: Entry, data: PyTree[Array], weights: Weights) -> Summary:
        """The w-weighted sum of what the mean of ∇f~ over ε depends on; additive over data."""

    @abstractmethod
    def change(self, entry: Entry, before: Entry, data: PyTree[Array], weights: Weights) -> Cotangent:
        """The summary of one entry less that of another, before its pull-back."""

    @abstractmethod
    def expected(self, summary: Summary, params: Params) -> Cotangent:
        """E_ε ∇f~, from the mean summary of all data."""

    @abstractmethod
    def lift(self, gradient: Params) -> Cotangent:
        """A gradient among the cotangents; `pull` gives it back."""

    @abstractmethod
    def pull_both(
        self,
        cotangent: Cotangent,
        change: Cotangent | None,
        params: Params,
        data: PyTree[Array],
        draws: Draws,
    ) -> tuple[Params, Summary | None]:
        """The gradient that a cotangent of these data and this noise stands for, and a change of their summary."""

    def pull(self, cotangent: Cotangent, params: Params, data: PyTree[Array], draws: Draws) -> Params:
        """The gradient that a cotangent of these data and this noise stands for."""
        return self.pull_both(cotangent, None, params, data, draws)[0]
