"""Every wrong argument meets a ValueError that names it and says what to do."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jointcv as jcv
from helpers import (
    BINARY,
    KEY,
    PROBLEMS,
    X2,
    X3,
    B,
    N,
    compose,
    logistic,
    wide_prior,
)
from jointcv.loop import start

pytestmark = pytest.mark.usefixtures("as_users_run")

GOOD = dict(log_prior=wide_prior, log_likelihood=logistic, data={"x": X3, "y": BINARY}, example=np.zeros(3))


def problem(**changes):
    return lambda: jcv.Problem(**(GOOD | changes))


def fit(name="logistic", **options):
    return lambda: jcv.fit(PROBLEMS[name], **({"key": KEY, "num_steps": 2, "batch_size": B} | options))


def objective(**changes):
    options = dict(
        loss=lambda w, datum, noise: ((datum["x"] * noise) @ w) ** 2,
        data={"x": X2},
        start=np.zeros(2),
        noise=jcv.GaussianNoise((2,)),
    )
    return lambda: jcv.DoublyStochastic(**(options | changes))


def by_hand(control, sampler=None, **options):
    def build():
        made = options.pop("objective", None) or compose("logistic", "parameter").objective
        algorithm = jcv.GradientDescent(
            made, control, sampler or jcv.Reshuffle(B), optax.sgd(1e-3), **options
        )
        return start(algorithm, KEY)

    return build


def descent():
    return jcv.GradientDescent(objective()(), jcv.NaiveGradient(), jcv.Reshuffle(B), optax.sgd(1e-3))


@lru_cache
def finished():
    return jcv.fit(PROBLEMS["logistic"], key=KEY, num_steps=1, batch_size=B, optimizer=optax.sgd(1e-3))


def with_value(value):
    x = X3.copy()
    x[7, 1] = value
    return {"x": x, "y": BINARY}


# what is wrong: (call, words that the message must have: the argument, its value, the remedy)
CASES = {
    # the problem
    "N differs between leaves": (
        problem(data={"x": X3, "y": BINARY[:-1]}),
        ["data", "22, 23", "same N rows"],
    ),
    "NaN in the data": (problem(data=with_value(np.nan)), ["data", "row 7", "impute"]),
    "infinite data": (problem(data=with_value(-np.inf)), ["data", "row 7", "impute"]),
    "no data": (problem(data={"x": X3[:0], "y": BINARY[:0]}), ["data", "N = 0", "at least one"]),
    "an empty pytree": (problem(data={}), ["data", "{}", "Pass a pytree of arrays"]),
    "None for data": (problem(data=None), ["data", "None", "Pass a pytree of arrays"]),
    "a leaf without rows": (problem(data={"x": X3, "y": 1.0}), ["data", "1.0", "one row a datum"]),
    "a string for data": (problem(data="rows.csv"), ["data", "rows.csv", "Pass arrays"]),
    "strings in the data": (problem(data={"x": X3, "y": np.array(["a"] * N)}), ["data", "'a'", "encode"]),
    "objects in the data": (problem(data={"x": X3, "y": np.array([None] * N)}), ["data", "None", "encode"]),
    "lists in the data": (problem(data={"x": X3.tolist(), "y": BINARY}), ["data", "np.asarray of a list"]),
    "a z that is not finite": (problem(example=np.full(3, np.nan)), ["example", "non-finite", "zeros"]),
    "objects for parameters": (
        problem(example=np.array([None] * 3)),
        ["example", "object", "floating-point"],
    ),
    "a z of another shape than the likelihood's": (
        problem(example=np.zeros(4)),
        ["log_likelihood", "(4,)", "one row of the data"],
    ),
    "a likelihood of a missing column": (
        problem(log_likelihood=lambda z, d: d["price"]),
        ["log_likelihood", "price", "one row of the data"],
    ),
    "a likelihood of one argument": (
        problem(log_likelihood=lambda z: z[0]),
        ["log_likelihood", "cannot be called", "log_likelihood(z, datum)"],
    ),
    "constraints that are no function": (problem(constrain=3), ["constrain=3", "function"]),
    "integer parameters": (problem(example=np.zeros(3, int)), ["example", "int", "floating-point"]),
    "boolean parameters": (problem(example=np.zeros(3, bool)), ["example", "bool", "floating-point"]),
    "a string for parameters": (problem(example="z"), ["example", "floating-point"]),
    "no parameters": (problem(example={}), ["example", "{}", "Pass a z"]),
    "parameters without entries": (problem(example=np.zeros(0)), ["example", "no entries", "Pass a z"]),
    "a likelihood of all data": (
        problem(log_likelihood=lambda z, d: d["x"] * z),
        ["log_likelihood", "(3,)", "scalar for one datum", "Sum over"],
    ),
    "a likelihood without a value": (
        problem(log_likelihood=lambda z, d: None),
        ["log_likelihood", "None", "must return a scalar"],
    ),
    "a likelihood of two values": (
        problem(log_likelihood=lambda z, d: (z[0], z[1])),
        ["log_likelihood", "must return a scalar"],
    ),
    "an integer likelihood": (
        problem(log_likelihood=lambda z, d: jnp.sum(d["x"] > 0)),
        ["log_likelihood", "int", "real number"],
    ),
    "a prior by coordinate": (problem(log_prior=lambda z: -(z**2)), ["log_prior", "(3,)", "scalar"]),
    "a prior that is no function": (problem(log_prior=-0.5), ["log_prior", "-0.5", "function"]),
    "a likelihood that is no function": (
        problem(log_likelihood=None),
        ["log_likelihood", "None", "function"],
    ),
    # how long, how much at once
    "a batch larger than N": (fit(batch_size=N + 1), ["batch_size=24", "N = 23", "at most"]),
    "a sampler's batch larger than N": (
        fit(batch_size=None, sampler=jcv.Reshuffle(99)),
        ["batch_size=99", "N = 23", "at most"],
    ),
    "a negative batch": (fit(batch_size=-1), ["batch_size=-1", "1 or more"]),
    "no batch": (fit(batch_size=0), ["batch_size=0", "1 or more"]),
    "half a batch": (fit(batch_size=2.5), ["batch_size=2.5", "whole number"]),
    "a sampler without data": (lambda: jcv.Reshuffle(0), ["Reshuffle", "batch_size=0", "1 or more"]),
    "fixed batches of no data": (
        lambda: jcv.FixedBatches(-3),
        ["FixedBatches", "batch_size=-3", "1 or more"],
    ),
    "draws of no data": (lambda: jcv.WithReplacement(0), ["WithReplacement", "batch_size=0", "1 or more"]),
    "two batch sizes": (fit(sampler=jcv.Reshuffle(7)), ["batch_size=5", "batch_size=7", "Give one"]),
    "epochs and steps": (fit(num_epochs=1), ["num_epochs=1", "num_steps=2", "Give one"]),
    "no steps": (fit(num_steps=0), ["num_steps=0", "at least one"]),
    "no epochs": (fit(num_steps=None, num_epochs=0), ["num_epochs=0", "at least one"]),
    "negative epochs": (fit(num_steps=None, num_epochs=-2), ["num_epochs=-2", "at least one"]),
    "epochs in words": (fit(num_steps=None, num_epochs="ten"), ["num_epochs='ten'", "at least one"]),
    "part of a step": (fit(num_steps=2.5), ["num_steps=2.5", "whole"]),
    "a budget in words": (fit(memory_budget="1 GB"), ["memory_budget='1 GB'", "0 or more"]),
    "a negative budget": (fit(memory_budget=-1), ["memory_budget=-1", "0 or more"]),
    "naive epochs before natural steps": (fit(naive_epochs=2), ["naive_epochs=2", "pass an optax optimizer"]),
    "a batch in words": (fit(batch_size="big"), ["batch_size='big'", "whole number"]),
    "two ways to choose a batch": (
        fit(batch_size="auto", sampler=jcv.Reshuffle(7)),
        ["batch_size='auto'", "Reshuffle", "Give one"],
    ),
    "a seed in words": (lambda: jcv.FixedBatches(B, seed="a"), ["FixedBatches", "seed='a'", "0 or more"]),
    "options beside an algorithm": (
        lambda: jcv.fit(compose("logistic", "parameter"), key=KEY, num_steps=1, control=jcv.JointCV()),
        ["control", "beside an algorithm", "Leave them out"],
    ),
    "a view of other data": (
        fit(view=jcv.WholeView(PROBLEMS["logistic2"])),
        ["view=WholeView", "another problem", "of this one"],
    ),
    "nothing to describe": (lambda: jcv.describe(X3), ["problem", "jointcv.Problem"]),
    "nothing to look at": (lambda: jcv.find_view(X3), ["problem", "jointcv.Problem"]),
    "negative naive epochs": (fit(naive_epochs=-1), ["naive_epochs=-1", "0 or more"]),
    "an empty chunk": (fit(chunk_size=0), ["chunk_size=0", "1 or more"]),
    "no epochs between ELBOs": (fit(elbo_every=0), ["elbo_every=0", "1 or more"]),
    "no draws for an ELBO": (fit(elbo_draws=0), ["elbo_draws=0", "1 or more"]),
    # what goes together
    "a number for a key": (fit(key=0), ["key=0", "jax.random.key(0)"]),
    "an old key": (fit(key=jnp.zeros(2, jnp.uint32)), ["key", "wrap_key_data"]),
    "many keys": (fit(key=jax.random.split(KEY)), ["key", "single"]),
    "no problem": (lambda: jcv.fit({"x": X3}, key=KEY), ["problem", "jointcv.Problem"]),
    "a number for an optimizer": (fit(optimizer=1e-3), ["optimizer=0.001", "optax"]),
    "a function for an optimizer": (fit(optimizer=optax.sgd), ["optimizer", "optax.sgd(1e-3)"]),
    "a string for a control": (fit(control="joint"), ["control='joint'", "JointCV()"]),
    "a class for a control": (fit(control=jcv.JointCV), ["control=JointCV", "class", "JointCV()"]),
    "a class for a family": (fit(family=jcv.MeanField), ["family=MeanField", "class", "MeanField()"]),
    "a string for a sampler": (fit(batch_size=None, sampler="all"), ["sampler='all'", "Reshuffle"]),
    "a string for a view": (fit(view="whole"), ["view='whole'", "WholeView"]),
    "a string for a noise": (fit(noise="quadrature"), ["noise='quadrature'", "ParameterNoise()"]),
    "a class for a memory": (lambda: jcv.JointCV(jcv.PerDatum), ["memory", "PerDatum", "class"]),
    "β above one": (lambda: jcv.EnsembleCV(1.5), ["weight=1.5", "[0, 1]", "Use 1 for cv"]),
    "β below zero": (lambda: jcv.EnsembleCV(-0.1), ["weight=-0.1", "[0, 1]", "Use 1 for cv"]),
    "β in words": (lambda: jcv.EnsembleCV("half"), ["weight='half'", "[0, 1]"]),
    "β is NaN": (lambda: jcv.EnsembleCV(float("nan")), ["weight=nan", "[0, 1]"]),
    "no steps between anchors": (lambda: jcv.Anchor(every=0), ["every=0", "1 or more"]),
    "no nodes": (lambda: jcv.Quadrature(0), ["nodes=0", "1 or more"]),
    "a table and replacement": (
        fit(control=jcv.JointCV(jcv.PerDatum()), batch_size=None, sampler=jcv.WithReplacement(B)),
        ["PerDatum()", "WithReplacement", "Use Reshuffle()"],
    ),
    "snapshots and fixed batches": (
        fit(control=jcv.JointCV(jcv.Snapshots()), batch_size=None, sampler=jcv.FixedBatches(B)),
        ["Snapshots()", "FixedBatches", "Use Reshuffle()"],
    ),
    "a batch's memory and reshuffling": (
        fit(control=jcv.JointCV(jcv.PerBatch()), batch_size=None, sampler=jcv.Reshuffle(B)),
        ["PerBatch()", "Reshuffle", "Use FixedBatches()"],
    ),
    "inc and a memory of one place": (
        lambda: jcv.SubsamplingCV(jcv.Anchor()),
        ["SubsamplingCV(memory", "Anchor", "WholeTable()"],
    ),
    "ens and a memory of one place": (
        lambda: jcv.EnsembleCV(memory=jcv.PerDatum()),
        ["EnsembleCV(memory", "PerDatum", "WholeTable()"],
    ),
    "inc and noise by datum": (
        fit(control=jcv.SubsamplingCV(), noise=jcv.PredictorNoise()),
        ["PredictorNoise", "SubsamplingCV", "Use ParameterNoise()"],
    ),
    "predictor noise without predictors": (
        fit("whole", noise=jcv.PredictorNoise()),
        ["PredictorNoise", "linear predictors", "Use ParameterNoise()"],
    ),
    "predictor noise under a whole view": (
        fit(noise=jcv.PredictorNoise(), view=jcv.WholeView(PROBLEMS["logistic"])),
        ["PredictorNoise", "Use ParameterNoise()"],
    ),
    "quadrature over three predictors": (
        fit("softmax", noise=jcv.Quadrature()),
        ["Quadrature", "has 3", "Use PredictorNoise()"],
    ),
    "the paper's noise and a linear view": (
        fit(noise=jcv.PaperNoise(), view=compose("logistic", "parameter").objective.view),
        ["PaperNoise", "WholeView(fold_prior(problem))"],
    ),
    "a start of another structure": (
        fit(family=jcv.MeanField(jcv.GivenStart({"z": np.zeros(3)}))),
        ["GivenStart(position", "example", "structure"],
    ),
    "a start of another size": (
        fit(family=jcv.MeanField(jcv.GivenStart(np.zeros(4)))),
        ["GivenStart(position", "(4,)", "example's shapes"],
    ),
    "a start that is not finite": (
        lambda: jcv.GivenStart(np.full(3, np.inf)),
        ["GivenStart(position", "non-finite"],
    ),
    "a start in words": (lambda: jcv.MeanField("zero"), ["MeanField(start=...)='zero'", "RandomStart()"]),
    "a class for a start": (
        lambda: jcv.MeanField(jcv.RandomStart),
        ["RandomStart", "class", "GivenStart(z)"],
    ),
    "a scale that is no number": (lambda: jcv.RandomStart("a"), ["RandomStart(log_scale", "'a'", "finite"]),
    "a scale that is NaN": (
        lambda: jcv.ConstantStart(0.0, np.nan),
        ["ConstantStart(log_scale", "nan", "finite"],
    ),
    # by hand
    "joint without a memory": (by_hand(jcv.JointCV()), ["control", "JointCV(PerDatum())"]),
    "a table and replacement, by hand": (
        by_hand(jcv.JointCV(jcv.PerDatum()), jcv.WithReplacement(B)),
        ["PerDatum()", "WithReplacement", "Use Reshuffle()"],
    ),
    "SMISO and replacement": (
        lambda: jcv.Smiso(compose("logistic", "parameter").objective, jcv.WithReplacement(B), 1e-3),
        ["Smiso", "WithReplacement", "Use Reshuffle()"],
    ),
    "SMISO without a step": (
        lambda: jcv.Smiso(compose("logistic", "parameter").objective, jcv.Reshuffle(B), -1.0),
        ["rate=-1.0", "positive"],
    ),
    "SMISO with a string for a step": (
        lambda: jcv.Smiso(compose("logistic", "parameter").objective, jcv.Reshuffle(B), "1e-3"),
        ["rate='1e-3'", "positive"],
    ),
    "SMISO beyond its minimum": (
        lambda: jcv.Smiso(compose("logistic", "parameter").objective, jcv.Reshuffle(B), 1e-3, decay=1.5),
        ["decay=1.5", "(0, 1]"],
    ),
    "a table of one place for a batch": (
        lambda: by_hand(jcv.JointCV(jcv.PerDatum()), objective=objective()())(),
        ["memory", "one place for a batch", "per_datum=True"],
    ),
    "snapshots of one place for a batch": (
        lambda: by_hand(jcv.JointCV(jcv.Snapshots()), objective=objective()())(),
        ["memory", "one place for a batch", "per_datum=True"],
    ),
    # the generic objective
    "a loss by coordinate": (objective(loss=lambda w, d, e: w * e), ["loss", "(2,)", "scalar for one datum"]),
    "an integer start": (objective(start=np.zeros(2, int)), ["start", "int", "floating-point"]),
    "an empty data set": (objective(data={"x": X2[:0]}), ["data", "N = 0", "at least one"]),
    "a shape for noise": (objective(noise=(2,)), ["noise=(2,)", "GaussianNoise"]),
    "a number for noise's shape": (lambda: jcv.GaussianNoise(2), ["shape=2", "(3,)"]),
    "noise of no numbers": (lambda: jcv.GaussianNoise((-1,)), ["shape", "-1", "1 or more"]),
    "noise of no scale": (lambda: jcv.GaussianNoise((2,), 1.0, "wide"), ["scale", "'wide'", "finite"]),
    # a finished run
    "a report of no run": (lambda: jcv.variance_report(X3, KEY), ["fit", "jointcv.fit"]),
    "a report without a key": (lambda: jcv.variance_report(finished(), 3), ["key=3", "jax.random.key(0)"]),
    "a report of no draws": (
        lambda: jcv.variance_report(finished(), KEY, num_draws=0),
        ["num_draws=0", "2 or more"],
    ),
    "a report of another objective": (
        lambda: jcv.variance_report(jcv.fit(descent(), key=KEY, num_steps=1), KEY),
        ["DoublyStochastic", "on a Problem"],
    ),
    "an ELBO of no draws": (lambda: finished().elbo(KEY, num_draws=0), ["num_draws=0", "1 or more"]),
    "an ELBO of no data at once": (lambda: finished().elbo(KEY, chunk_size=0), ["chunk_size=0", "1 or more"]),
    "an ELBO without a key": (lambda: finished().elbo(3), ["key=3", "jax.random.key(0)"]),
    "no draws": (lambda: finished().sample(KEY, -1), ["num_draws=-1", "1 or more"]),
    "draws without a key": (lambda: finished().sample(3), ["key=3", "jax.random.key(0)"]),
    "ArviZ without a key": (lambda: finished().to_arviz(3), ["key=3", "jax.random.key(0)"]),
    "no draws for ArviZ": (lambda: finished().to_arviz(num_draws=0), ["num_draws=0", "1 or more"]),
    "no data at once for ArviZ": (
        lambda: finished().to_arviz(num_draws=2, log_likelihood=True, chunk_size=-1),
        ["chunk_size=-1", "1 or more"],
    ),
    "no more epochs": (lambda: finished().extend(num_epochs=0), ["num_epochs=0", "at least one"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_named_with_a_remedy(name):
    call, words = CASES[name]
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


def test_what_looks_odd_and_is_right():
    """Neighbours of the wrong arguments: these must pass."""
    jcv.Problem(**(GOOD | {"data": {"x": X3, "y": BINARY, "seen": BINARY > 0}}))
    jcv.Problem(**(GOOD | {"example": [0.0, 0.0, 0.0], "log_prior": _listed, "log_likelihood": _listed}))
    for weight in (0, 1, 0.5):
        jcv.EnsembleCV(weight)
    compose("logistic", "parameter", sampler=jcv.Reshuffle(np.int64(N)))
    fit(num_steps=None, num_epochs=0.3, optimizer=optax.sgd(1e-3))()
    three = np.int64(3)
    done = fit(
        num_steps=three, batch_size=three, chunk_size=three, naive_epochs=three, optimizer=optax.sgd(1e-3)
    )()
    assert done.sample(KEY, three).shape == (3, 3)


def _listed(z, datum=None):
    return z[0] + z[1] + z[2]


def test_few_data():
    """N = 1, and a batch of all of it."""
    one = jcv.Problem(**(GOOD | {"data": {"x": X3[:1], "y": BINARY[:1]}}))
    done = jcv.fit(one, key=KEY, num_epochs=2, optimizer=optax.sgd(1e-3))
    assert done.status == "completed" and np.isfinite(done.history["loss"]).all()


def test_numbers_beyond_single_precision():
    """Where JAX is as it comes, 2⁴⁰ would silently become 0, and 1e300 infinite."""
    with jax.enable_x64(False):
        for name, value in (("seen", np.full(N, 2**40)), ("price", np.full(N, 1e300))):
            with pytest.raises(ValueError, match="data has .* row 0, or one beyond"):
                jcv.Problem(**(GOOD | {"data": {"x": X3, "y": BINARY, name: value}}))
