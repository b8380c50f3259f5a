"""Dropout on CIFAR-10: the output layer of a LeNet, fine-tuned under multiplicative noise on its 84 features.

    f(w; n, ε) = −log softmax(W (x_n ⊙ ε) + b)[y_n],   ε ~ N(1, 0.5²)

f~ is the second-order expansion around ε = 1. The LeNet is trained here, its features kept in the cache
folder. The objective is a mean over the data; `elbo` in the result file is its negative on fixed draws of ε.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Scalar
from tqdm.auto import tqdm

import jointcv as jcv
from jointcv.paper.data import load_cifar10
from jointcv.paper.fetch import cache_folder
from jointcv.paper.files import SWEEP, TIMING, VARIANCE, add_rows, add_run, read_rows, surroundings

NUM_FEATURES, NUM_CLASSES = 84, 10
NOISE_SCALE = 0.5
BATCH = 100
TIMED_STEPS = 20


@dataclass(frozen=True)
class DropoutBudget:
    """How much is run: of the LeNet's training and of the fine-tuning."""

    lenet_epochs: int
    num_rows: int
    epochs: int
    step_sizes: tuple[float, ...]
    num_seeds: int
    draws: int
    trace_draws: int


BUDGETS = {
    "smoke": DropoutBudget(0, 300, 1, (1e-1,), 1, 2, 4),
    "short": DropoutBudget(2, 50_000, 4, (5e-1, 1e-1, 2e-2), 1, 4, 200),
    "paper": DropoutBudget(30, 50_000, 30, (1.0, 5e-1, 1e-1, 5e-2, 1e-2), 5, 50, 1000),
}
CONTROLS = {
    "naive": jcv.NaiveGradient(),
    "joint": jcv.JointCV(jcv.Anchor()),
    "cv": jcv.MonteCarloCV(),
}
NOTES = (
    "elbo is minus the training objective (mean logistic loss under dropout noise)",
    "joint keeps one anchor, renewed every epoch (the SVRG form)",
    "plain SGD, batches of 100; the output layer starts at the LeNet's own",
    "milliseconds are processor time on one core",
    "v_total, v_data, v_noise (their difference) are of the naive gradient at the same place",
)


class LeNet(eqx.Module):
    """Two convolutions, two hidden layers and an output layer."""

    convolutions: list[eqx.nn.Conv2d]
    hidden: list[eqx.nn.Linear]
    output: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.convolutions = [eqx.nn.Conv2d(3, 6, 5, key=keys[0]), eqx.nn.Conv2d(6, 16, 5, key=keys[1])]
        self.hidden = [
            eqx.nn.Linear(400, 120, key=keys[2]),
            eqx.nn.Linear(120, NUM_FEATURES, key=keys[3]),
        ]
        self.output = eqx.nn.Linear(NUM_FEATURES, NUM_CLASSES, key=keys[4])

    def features(self, image: Float[Array, "3 32 32"]) -> Float[Array, " features"]:
        """What goes into the output layer."""
        for convolution in self.convolutions:
            image = jax.nn.relu(convolution(image))
            channels, height, width = image.shape
            image = image.reshape(channels, height // 2, 2, width // 2, 2).max(axis=(2, 4))
        vector = image.reshape(-1)
        for layer in self.hidden:
            vector = jax.nn.relu(layer(vector))
        return vector


class Features(eqx.Module):
    """The LeNet's features of the training images, its output layer and how well it does."""

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    test_accuracy: float


def run_dropout(budget_name: str, folder: Path, estimators: tuple[str, ...] | None = None) -> None:
    """Train the LeNet if its features are not at hand, then fine-tune with every control."""
    budget = BUDGETS[budget_name]
    names = tuple(name for name in CONTROLS if estimators is None or name in estimators)
    features = load_features(budget)
    facts = {
        "task": "dropout",
        "num_data": len(features.y),
        "dim": (NUM_FEATURES + 1) * NUM_CLASSES,
        "batch": BATCH,
        "optimizer": "sgd",
        "lenet_test_accuracy": float(features.test_accuracy),
        "notes": NOTES,
    }
    done = {row["estimator"] for row in read_rows(folder / "dropout.csv")}
    for name in (name for name in names if name not in done):
        began = time.perf_counter()
        _run(features, budget, name, folder)
        cells = {"step_sizes": budget.step_sizes, "seeds": list(range(budget.num_seeds))}
        run = {"stage": "sweep", "budget": budget_name, "configuration": asdict(budget)}
        run |= {"estimators": {name: cells}, "seconds": round(time.perf_counter() - began, 1)}
        add_run(folder / "dropout.json", facts, surroundings() | run)


def dropout_objective(features: Features) -> jcv.DoublyStochastic:
    """The mean logistic loss under dropout noise."""

    def loss(params, datum, noise) -> Scalar:
        logits = params["weight"] @ (datum["x"] * noise) + params["bias"]
        return -jax.nn.log_softmax(logits)[datum["y"]]

    return jcv.DoublyStochastic(
        loss=loss,
        data={"x": features.x, "y": features.y},
        start={"weight": features.weight, "bias": features.bias},
        noise=jcv.GaussianNoise((NUM_FEATURES,), 1.0, NOISE_SCALE),
    )


def _run(features: Features, budget: DropoutBudget, name: str, folder: Path) -> None:
    objective = dropout_objective(features)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=budget.step_sizes[0])
    algorithm = jcv.GradientDescent(
        objective=objective, control=CONTROLS[name], sampler=jcv.Reshuffle(BATCH), optimizer=optimizer
    )
    seeds = np.arange(budget.num_seeds, dtype=np.uint32)
    checkpoints = jcv.sweep(
        algorithm,
        jcv.LearningRate(),
        budget.step_sizes,
        jax.vmap(jax.random.key)(seeds),
        num_epochs=budget.epochs,
        record=jcv.FullElbo(objective, budget.draws),
        progress=f"dropout {name}",
    )
    rows = []
    for seed in seeds:
        for v, value in enumerate(budget.step_sizes):
            for checkpoint in checkpoints:
                values = checkpoint.record[seed, v].astype(np.float64)
                rows.append(
                    {
                        "task": "dropout",
                        "estimator": name,
                        "step_size": value,
                        "seed": int(seed),
                        "epoch": checkpoint.epoch,
                        "step": checkpoint.step,
                        "elbo": float(values.mean()),
                        "elbo_se": float(values.std(ddof=1) / values.size**0.5),
                        "status": "completed" if checkpoint.alive[seed, v] else "diverged",
                    }
                )
    add_rows(folder / "dropout.csv", SWEEP, rows)
    _trace(algorithm, budget, name, folder)


def _trace(algorithm, budget: DropoutBudget, name: str, folder: Path) -> None:
    """Variances along a run at the first step size, and what a step takes."""
    began = time.process_time()
    fit = jcv.fit(algorithm, key=jax.random.key(0), num_epochs=1)
    first = time.process_time() - began
    for epoch in range(1, budget.epochs + 1):
        own, total, data = _variances(fit, jax.random.split(jax.random.key(epoch), budget.trace_draws))
        row = {
            "task": "dropout",
            "estimator": name,
            "step": int(fit.run.step),
            "epoch": epoch,
            "trace_location": own,
            "trace_scale": 0.0,
            "v_total": total,
            "v_data": data,
            "v_noise": total - data,
        }
        add_rows(folder / "dropout.variance.csv", VARIANCE, [row])
        if epoch < budget.epochs:
            began = time.process_time()
            fit = fit.extend(num_epochs=1)
            taken = time.process_time() - began
    steps = algorithm.sampler.steps_per_epoch(algorithm.objective.num_data)
    taken = taken if budget.epochs > 1 else first
    calls = {"naive": BATCH, "cv": 2 * BATCH, "joint": 3 * BATCH}
    timing = {
        "task": "dropout",
        "estimator": name,
        "ms_per_step": taken / steps * 1e3,
        "spread": 0.0,
        "oracle_calls_per_step": float(calls[name]),
        "compile_seconds": max(0.0, first - taken),
    }
    add_rows(folder / "dropout.timing.csv", TIMING, [timing])


@eqx.filter_jit
def _gradients(algorithm, state, keys):
    """For each key a minibatch's own gradient, and two naive ones with independent ε."""
    objective, control, params = algorithm.objective, algorithm.control, algorithm.params(state)

    def one(key):
        rows = jax.random.randint(key, (BATCH,), 0, objective.num_data)
        data = jax.tree.map(lambda leaf: leaf[rows], objective.data)
        weights = jnp.full(BATCH, 1 / BATCH, data["x"].dtype)
        batch = jcv.Batch(data, rows, weights, jnp.zeros_like(weights), jnp.ones((), jnp.int32))
        recall = control.memory.read(state.memory, None, None, objective, params, batch)
        entry = objective.remember(params, data)

        def naive(number):
            draws = objective.draw(jax.random.fold_in(key, number), params, data)
            return draws, objective.gradient(entry, params, data, weights, draws)

        (draws, first), (_, second) = naive(1), naive(2)
        own = jax.tree.map(jnp.add, first, control.correct(objective, recall, params, batch, draws))
        return [ravel_pytree(gradient)[0] for gradient in (own, first, second)]

    return jax.lax.map(one, keys)


def _variances(fit: jcv.Fit, keys) -> tuple[float, float, float]:
    """The estimator's own variance, and V_{n,ε} and V_n of the naive gradient."""
    gradients = _gradients(fit.algorithm, fit.run.state, keys)
    own, first, second = (np.asarray(side, np.float64) for side in gradients)
    covariance = np.sum((first - first.mean(0)) * (second - second.mean(0))) / (len(first) - 1)
    total = (first.var(0, ddof=1).sum() + second.var(0, ddof=1).sum()) / 2
    return float(own.var(0, ddof=1).sum()), float(total), float(covariance)


def load_features(budget: DropoutBudget) -> Features:
    """From the cache folder, else from a LeNet that is trained now."""
    path = cache_folder() / "lenet" / f"features-{budget.lenet_epochs}-{budget.num_rows}.npz"
    names = ("x", "y", "weight", "bias", "test_accuracy")
    if not path.exists():
        features = train_lenet(budget)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{name: getattr(features, name) for name in names})
    with np.load(path) as arrays:
        return Features(**{name: arrays[name] for name in names})


def train_lenet(budget: DropoutBudget) -> Features:
    """Adam with a cosine decay on the training images, centred and scaled by channel."""
    data = load_cifar10()
    train, test = (
        (part.images[: budget.num_rows], part.labels[: budget.num_rows].astype(np.int32))
        for part in (data.train, data.test)
    )
    mean = train[0].mean(axis=(0, 2, 3), keepdims=True)
    deviation = train[0].std(axis=(0, 2, 3), keepdims=True)

    def scale(images):
        return ((images - mean) / deviation).astype(np.float32)

    rng, net = np.random.default_rng(0), LeNet(jax.random.key(0))
    steps = len(train[1]) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, max(1, budget.lenet_epochs * steps)))
    state = optimizer.init(eqx.filter(net, eqx.is_array))

    @eqx.filter_jit
    def step(net, state, images, labels):
        def loss(net):
            logits = jax.vmap(lambda image: net.output(net.features(image)))(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        updates, state = optimizer.update(eqx.filter_grad(loss)(net), state)
        return eqx.apply_updates(net, updates), state

    for _ in range(budget.lenet_epochs):
        order = rng.permutation(len(train[1]))[: steps * BATCH].reshape(steps, BATCH)
        for rows in tqdm(order, desc="LeNet"):
            net, state = step(net, state, scale(train[0][rows]), train[1][rows])
    x, held_out = (_features(net, scale, images) for images, _ in (train, test))
    predicted = np.argmax(held_out @ np.asarray(net.output.weight).T + np.asarray(net.output.bias), axis=1)
    accuracy = float(np.mean(predicted == test[1]))
    return Features(x, train[1], np.asarray(net.output.weight), np.asarray(net.output.bias), accuracy)


def _features(net: LeNet, scale, images: np.ndarray) -> np.ndarray:
    apply = eqx.filter_jit(lambda net, images: jax.vmap(net.features)(images))
    parts = [apply(net, scale(images[i : i + 1000])) for i in range(0, len(images), 1000)]
    return np.concatenate(parts)
