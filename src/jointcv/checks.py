"""Arguments that every public function looks at in the same way: a ValueError with the name, the value, the remedy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_type(name: str, value: Any, kind: Any, remedy: str) -> None:
    """`value` is an instance of `kind`; a class in the place of its instance is told so."""
    if isinstance(value, kind):
        return
    if isinstance(value, type):
        raise ValueError(f"{name}={value.__name__} is a class. {remedy}")
    raise ValueError(f"{name}={value!r} is not what is needed here. {remedy}")


def check_count(name: str, value: Any, what: str, *, least: int = 1) -> int:
    """`value` as Python's own integer, a whole number of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}={value!r} is not a number of {what}. Use a whole number, {least} or more.")
    return int(value)


def check_number(name: str, value: Any, remedy: str) -> None:
    """`value` is a finite number; an array may be traced and is left alone."""
    if isinstance(value, jax.Array):
        return
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise ValueError(f"{name}={value!r} is not a finite number. {remedy}")


def as_static(value: Any) -> Any:
    """A NumPy number as Python's own, for fields that are static under `jit`; anything else as it is."""
    return value.item() if isinstance(value, np.number) else value


def check_key(key: Any) -> None:
    """`key` is one typed JAX key."""
    is_key = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_key or key.shape != ():
        raise ValueError(
            f"key={key!r} is not a single JAX key. Use jax.random.key(0), "
            "or jax.random.wrap_key_data(key) for a key of jax.random.PRNGKey."
        )
