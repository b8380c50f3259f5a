"""One trace a run; chunks, resuming and saving change nothing; no table in the carry; imports point one way."""

import ast
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_array_equal

import jointcv as jcv
from helpers import BINARY, KEY, PROBLEMS, X3, B, N, bernoulli, compose, joint_setup, wide_prior
from jointcv import checkpoint
from jointcv.loop import advance, advance_epochs, epoch_schedule, plan_chunks, run_chunk, start

SOURCE = Path(jcv.__file__).parent
STEPS = 5


# ---------------------------------------------------------------- traces


class Counted:
    """A log likelihood that knows how often Python has run it."""

    def __init__(self):
        self.calls = 0

    def __call__(self, z, datum):
        self.calls += 1
        return bernoulli(datum["x"] @ z, datum["y"])


@pytest.mark.parametrize("whole", [False, True])
def test_python_sees_the_likelihood_once_a_run(whole):
    """The number of traces is the same whatever the number of epochs, of steps an epoch, and of chunks."""

    def traces(num_epochs, num_data=N):
        counted = Counted()
        problem = jcv.Problem(
            log_prior=wide_prior,
            log_likelihood=counted,
            data={"x": np.resize(X3, (num_data, 3)), "y": np.resize(BINARY, num_data)},
            example=np.zeros(3),
        )
        control = jcv.JointCV(jcv.Anchor())
        algorithm = compose(problem, "parameter", control, whole=whole)
        before = counted.calls
        jcv.fit(algorithm, key=KEY, num_epochs=num_epochs, chunk_size=2 * STEPS)
        return before, counted.calls

    found, ran = traces(2)
    assert traces(40) == (found, ran)  # twenty chunks for one
    if whole:
        assert ran > found
    else:
        assert ran == found  # once read, the model's Python is not needed again


# ---------------------------------------------------------------- chunks, resuming, saving


def everything(fit):
    """All that a run is, as NumPy arrays."""
    run = eqx.tree_at(lambda run: run.key, fit.run, jax.random.key_data(fit.run.key))
    return [np.asarray(leaf) for leaf in jax.tree.leaves((run, fit.history))]


def assert_same(one, other):
    assert one.status == other.status
    for left, right in zip(everything(one), everything(other), strict=True):
        assert_array_equal(left, right)


def setups():
    options = dict(naive_steps=STEPS, optimizer=optax.sgd(1e-3, momentum=0.9))
    yield "joint-datum", joint_setup("softmax", "predictor", "datum", False, **options)
    yield "joint-snapshots", joint_setup("logistic", "paper", "snapshots", True, **options)
    yield "joint-batch", joint_setup("whole", "parameter", "batch", True, **options)
    yield "joint-anchor3", compose("logistic", "parameter", jcv.JointCV(jcv.Anchor(every=3)), **options)
    yield "smiso", jcv.Smiso(compose("logistic", "parameter").objective, jcv.Reshuffle(B), 1e-2)


@pytest.mark.parametrize("name", [name for name, _ in setups()])
def test_chunks_and_resuming_change_nothing(name, tmp_path):
    """Seven epochs, to the last bit: at once, in chunks that cut epochs, resumed within an epoch, saved and loaded."""
    algorithm = dict(setups())[name]
    whole = jcv.fit(algorithm, key=KEY, num_epochs=7)
    assert len(whole.history["loss"]) == 7 * STEPS
    assert_same(jcv.fit(algorithm, key=KEY, num_epochs=7, chunk_size=3), whole)

    part = jcv.fit(algorithm, key=KEY, num_steps=13)
    part_before = everything(part)
    assert_same(part.extend(num_steps=7 * STEPS - 13), whole)
    for left, right in zip(everything(part), part_before, strict=True):
        assert_array_equal(left, right)  # extending leaves the first run as it was

    checkpoint.save(tmp_path / "run", part)
    loaded = checkpoint.load(tmp_path / "run", algorithm)
    assert_same(loaded, part)
    assert loaded.seconds == part.seconds
    assert_same(loaded.extend(num_steps=7 * STEPS - 13), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_elbo_on_the_way_changes_nothing():
    algorithm = joint_setup("logistic", "parameter", "datum", False)
    quiet = jcv.fit(algorithm, key=KEY, num_epochs=5)
    watched = jcv.fit(algorithm, key=KEY, num_epochs=5, elbo_every=2, elbo_draws=3)
    assert_array_equal(watched.history["loss"], quiet.history["loss"])
    assert_array_equal(watched.params.location, quiet.params.location)
    assert_array_equal(watched.history["elbo_step"], [2 * STEPS, 4 * STEPS, 5 * STEPS])
    assert watched.history["elbo"].shape == watched.history["elbo_standard_error"].shape == (3,)


@pytest.mark.parametrize(
    "first, last, size", [(0, 35, 1000), (0, 35, 3), (0, 37, 12), (3, 37, 10), (0, 1, 1)]
)
def test_chunks_partition_the_steps(first, last, size):
    chunks = list(plan_chunks(first, last, STEPS, size))
    assert [chunk.first for chunk in chunks] == list(np.cumsum([first, *(c.length for c in chunks)])[:-1])
    assert sum(chunk.length for chunk in chunks) == last - first
    for chunk in chunks:
        assert 0 < chunk.length <= size
        if chunk.num_epochs:
            assert (chunk.first % STEPS, chunk.length) == (0, chunk.num_epochs * STEPS)
        else:
            assert chunk.first % STEPS + chunk.length <= STEPS


# ---------------------------------------------------------------- the table, and other large arrays


def equations(jaxpr):
    """Every equation of a jaxpr, inner ones too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize(
    "memory, whole", [("datum", False), ("batch", True), ("snapshots", True), ("anchor", True)]
)
def test_the_table_is_not_carried(memory, whole):
    """No scan over an epoch's steps carries the table: neither the N rows, nor the iterates of an epoch."""
    algorithm = joint_setup("logistic", "parameter", memory, whole)
    run = start(algorithm, KEY)
    schedule = epoch_schedule(algorithm, KEY, 0)
    jaxpr = eqx.filter_make_jaxpr(advance)(algorithm, run, schedule)[0]
    scans = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "scan" and e.params["length"] == STEPS]
    steps = max(scans, key=lambda equation: len(equation.outvars))
    consts, carried = steps.params["num_consts"], steps.params["num_carry"]
    shapes = [var.aval.shape for var in steps.invars[consts : consts + carried]]
    assert len(shapes) >= 4  # parameters, step, whether alive
    assert max(map(np.prod, shapes)) <= 3  # D = 3: nothing has N or N/B rows


def test_the_run_is_donated():
    """A chunk takes over its run's buffers."""
    algorithm = joint_setup("logistic", "parameter", "datum", False)
    run = start(algorithm, KEY)
    for size in (1000, 3):
        (chunk, *_) = plan_chunks(0, STEPS, STEPS, size)
        before, schedule = run, None
        run, _, schedule = run_chunk(algorithm, run, chunk, schedule)
        assert before.table.is_deleted()
        assert before.state.params.location.is_deleted()
        run = start(algorithm, KEY)


def test_a_start_survives_its_run():
    """What the user passes is never donated."""
    position, key = jnp.array([0.1, 0.2, 0.3]), jax.random.key(3)
    algorithm = compose("logistic", "parameter", start=jcv.GivenStart(position))
    first = jcv.fit(algorithm, key=key, num_epochs=1)
    again = jcv.fit(algorithm, key=key, num_epochs=1)
    assert_array_equal(position, [0.1, 0.2, 0.3])
    assert_same(first, again)
    assert not X3.flags.writeable or PROBLEMS["logistic"].data["x"].shape == X3.shape


@pytest.mark.parametrize("noise, whole", [("quadrature", False), ("parameter", False), ("paper", True)])
def test_large_arrays_are_arguments(noise, whole):
    """The data, 60,000 numbers, and the table are no constants of the compiled step."""
    x = np.random.default_rng(0).normal(size=(20_000, 3))
    problem = jcv.Problem(
        log_prior=wide_prior,
        log_likelihood=lambda z, datum: bernoulli(datum["x"] @ z, datum["y"]),
        data={"x": x, "y": np.ones(20_000)},
        example=np.zeros(3),
    )
    algorithm = compose(problem, noise, sampler=jcv.Reshuffle(100), whole=whole)
    run = eqx.filter_eval_shape(start, algorithm, KEY)
    jaxpr = eqx.filter_make_jaxpr(lambda algorithm, run: advance_epochs(algorithm, run, 2))(algorithm, run)[0]
    constants = [*jaxpr.consts]
    for equation in equations(jaxpr.jaxpr):
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            constants += getattr(value, "consts", [])
    assert max((np.size(constant) for constant in constants), default=0) <= 1e4
    assert any(np.prod(var.aval.shape) == x.size for var in jaxpr.jaxpr.invars)


# ---------------------------------------------------------------- imports

ORDER = [  # a module imports only from earlier lines (design.md, section 5), or from its own
    ["checks", "jaxprs", "cut"],
    ["linear_rules", "linear_graph", "linear"],
    ["moment_rules", "moments"],
    ["problem"],
    ["numpyro_rows", "numpyro_run", "numpyro_refuse", "numpyro_model"],
    ["view"],
    ["find"],
    ["family"],
    ["noise"],
    ["prior"],
    ["objective"],
    ["elbo", "stochastic"],
    ["sampler"],
    ["evaluate"],
    ["memory"],
    ["control"],
    ["smoothness"],
    ["algorithm"],
    ["plan"],
    ["describe"],
    ["loop"],
    ["stepwise", "sweep"],
    ["arviz", "guide"],
    ["fit"],
    ["checkpoint"],
    ["diagnostics"],
    ["plot"],
    ["numpyro"],
    ["paper"],
    ["cli"],
]


def imports(path: Path) -> set[str]:
    """The modules of the package that a file names, without the package's name; "" is the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {
                name for name in modules if (SOURCE.parent / f"{name.replace('.', '/')}.py").exists()
            }
            found |= submodules or {node.module}
    return {name.removeprefix("jointcv").lstrip(".") for name in found if name.split(".")[0] == "jointcv"}


def modules() -> dict[str, Path]:
    paths = {path.relative_to(SOURCE).with_suffix(""): path for path in SOURCE.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def test_imports_point_one_way():
    level = {name: number for number, names in enumerate(ORDER) for name in names}
    for name, path in modules().items():
        if name == "__init__":
            continue
        own = name.split(".")[0]
        assert own in level, f"give {name} a place in ORDER"
        for other in imports(path) - {""}:
            there = other.split(".")[0]
            assert there == own or level[there] <= level[own], f"{name} imports {other}"


def test_there_is_no_circle():
    """Within a line of ORDER, too."""
    edges = {name: {other for other in imports(path) if other} for name, path in modules().items()}
    done: set[str] = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in edges.get(name, ()):
                if not other.startswith(f"{name}.") and not name.startswith(f"{other}."):
                    visit(other, [*trail, name])
            done.add(name)

    for name in edges:
        if name not in ("__init__", "control", "diagnostics", "paper"):
            visit(name, [])


def test_the_paper_uses_public_names_only():
    """`import jointcv as jcv` and its public names, and its own modules."""
    public = {name for name in vars(jcv) if not name.startswith("_")}
    wrong = []
    for path in (SOURCE / "paper").glob("*.py"):
        wrong += [
            f"{path.name} imports jointcv.{m}" for m in imports(path) if m and m.split(".")[0] != "paper"
        ]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "jcv":
                if node.attr not in public:
                    wrong.append(f"{path.name} uses jcv.{node.attr}")
    assert not wrong, "\n".join(sorted(wrong))


def test_public_names_are_reexported():
    """`import x as x` and nothing else, so that type checkers see them as public."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    for node in tree.body[1:]:
        assert isinstance(node, ast.ImportFrom)
        assert all(alias.asname == alias.name for alias in node.names)


def test_warnings_are_errors():
    with pytest.raises(UserWarning):
        warnings.warn("so", stacklevel=1)
