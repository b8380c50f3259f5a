"""From the canonical files of the paper's data sets to arrays; nothing here touches the network."""

import csv
import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Float32, Float64, Int32, Shaped, UInt8

SONAR_FIELDS = 61
AUSTRALIAN_FIELDS = 15

IDX_UINT8 = b"\x00\x00\x08"

CIFAR10_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR10_TEST = "test_batch"
CIFAR10_IMAGE = (3, 32, 32)

GENRES = (
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)
ITEM_FIELDS = 24
FIRST_GENRE_FIELD = 6  # after id, title, two dates, address and the flag "unknown"

# Round robins are played beside the first round, so both come first.
ROUND_ORDER = {"R128": 0, "RR": 0, "R64": 1, "R32": 2, "R16": 3, "QF": 4, "SF": 5, "F": 6}
UNFINISHED = re.compile("RET|W/O|DEF|nbsp|Def.")
SHORTEST_SCORE = 5
DROPPED_LEVELS = frozenset("CSD")


@dataclass(frozen=True, eq=False)
class Binary:
    """A binary classification task: standardised features `X`, labels `y`, features as published."""

    X: Float32[np.ndarray, "num_data num_features"]
    y: Int32[np.ndarray, " num_data"]
    X_raw: Float64[np.ndarray, "num_data num_features"]


@dataclass(frozen=True, eq=False)
class Mnist:
    """Digits with pixels 0..255 as published."""

    x_train: UInt8[np.ndarray, "num_train 28 28"]
    y_train: UInt8[np.ndarray, " num_train"]
    x_test: UInt8[np.ndarray, "num_test 28 28"]
    y_test: UInt8[np.ndarray, " num_test"]


@dataclass(frozen=True, eq=False)
class Tennis:
    """Matches between players numbered by sorted name, in the order they were played."""

    winner_ids: Int32[np.ndarray, " num_data"]
    loser_ids: Int32[np.ndarray, " num_data"]
    num_player: int
    tourney_date: Int32[np.ndarray, " num_data"]
    player_names: Shaped[np.ndarray, " num_player"]


@dataclass(frozen=True, eq=False)
class MovieLens:
    """Ratings `y` = 0..4 with the genres `X` of the movie, by users `group_id`."""

    X: UInt8[np.ndarray, "num_data 18"]
    y: Int32[np.ndarray, " num_data"]
    group_id: Int32[np.ndarray, " num_data"]
    num_groups: int
    item_id: Int32[np.ndarray, " num_data"]
    timestamp: Int32[np.ndarray, " num_data"]
    genre_names: Shaped[np.ndarray, " 18"]


@dataclass(frozen=True, eq=False)
class Images:
    """Colour images 0..255 and their labels 0..9."""

    images: UInt8[np.ndarray, "num_data 3 32 32"]
    labels: UInt8[np.ndarray, " num_data"]


@dataclass(frozen=True, eq=False)
class Cifar10:
    """Training images in the order of the five batches, and test images."""

    train: Images
    test: Images


def parse_sonar(content: bytes) -> Binary:
    """Sonar returns from `sonar.all-data`: 60 numbers and R (rock, 1) or M (mine, 0) a line."""
    rows = _rows(content, "sonar.all-data", ",", SONAR_FIELDS)
    labels = {"R": 1, "M": 0}
    return _binary([row[:-1] for row in rows], [labels[row[-1]] for row in rows])


def parse_australian(content: bytes) -> Binary:
    """Credit applications from `australian.dat`: 14 numbers and 0 or 1 a line."""
    rows = _rows(content, "australian.dat", None, AUSTRALIAN_FIELDS)
    return _binary([row[:-1] for row in rows], [int(row[-1]) for row in rows])


def parse_idx(content: bytes) -> UInt8[np.ndarray, "..."]:
    """An array of bytes from an uncompressed idx file."""
    if content[:3] != IDX_UINT8:
        raise ValueError(f"not an idx file of unsigned bytes: it starts with {content[:4]!r}")
    num_axes = content[3]
    start = 4 + 4 * num_axes
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    values = np.frombuffer(content, np.uint8, offset=start)
    if values.size != np.prod(shape, dtype=np.int64):
        raise ValueError(f"idx file of shape {shape} has {values.size} values")
    return values.reshape(shape).copy()


def parse_mnist(train_images: bytes, train_labels: bytes, test_images: bytes, test_labels: bytes) -> Mnist:
    """MNIST from its four gzip-compressed idx files."""
    files = (train_images, train_labels, test_images, test_labels)
    return Mnist(*(parse_idx(gzip.decompress(file)) for file in files))


def parse_cifar10_batch(content: bytes) -> Images:
    """One official binary batch: a label byte and 3072 bytes of red, green, blue an image."""
    record = 1 + int(np.prod(CIFAR10_IMAGE))
    if len(content) % record:
        raise ValueError(f"CIFAR-10 batch of {len(content)} bytes is no whole number of {record}-byte images")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return Images(images=records[:, 1:].reshape(-1, *CIFAR10_IMAGE).copy(), labels=records[:, 0].copy())


def parse_cifar10(archive: Path) -> Cifar10:
    """CIFAR-10 from `cifar-10-binary.tar.gz`, without unpacking it to disk."""
    batches = dict(_cifar10_members(archive))
    missing = [name for name in (*CIFAR10_TRAIN, CIFAR10_TEST) if name not in batches]
    if missing:
        raise ValueError(f"{archive.name} has no {missing[0]}.bin")
    return join_cifar10([batches[name] for name in CIFAR10_TRAIN], batches[CIFAR10_TEST])


def join_cifar10(train: Sequence[Images], test: Images) -> Cifar10:
    """One training set of the five batches, and the test batch."""
    images = np.concatenate([batch.images for batch in train])
    labels = np.concatenate([batch.labels for batch in train])
    return Cifar10(train=Images(images, labels), test=test)


def parse_movielens(archive: Path) -> MovieLens:
    """MovieLens-100K from `u.data` and `u.item` in `ml-100k.zip`, rows in the order of `u.data`."""
    with zipfile.ZipFile(archive) as members:
        ratings = np.loadtxt(io.BytesIO(members.read("ml-100k/u.data")), np.int32, delimiter="\t", ndmin=2)
        genres = _genres(members.read("ml-100k/u.item"))
    user, item, rating, timestamp = (np.ascontiguousarray(column) for column in ratings.T)
    return MovieLens(
        X=np.array([genres[movie] for movie in item.tolist()], np.uint8),
        y=rating - 1,
        group_id=user - 1,
        num_groups=int(user.max()),
        item_id=item - 1,
        timestamp=timestamp,
        genre_names=np.array(GENRES),
    )


def parse_tennis(years: Iterable[bytes]) -> Tennis:
    """Completed tour matches from `atp_matches_YYYY.csv`, one file a year in ascending order.

    Args:
        years: the contents of the yearly files.

    Returns:
        The matches, sorted by date of the tournament, then round; otherwise in the order of the files.
    """
    matches = [match for year in years for match in _completed_matches(year)]
    matches.sort(key=lambda match: match[:2])
    names = sorted({name for match in matches for name in match[2:]})
    number = {name: index for index, name in enumerate(names)}
    return Tennis(
        winner_ids=np.array([number[winner] for _, _, winner, _ in matches], np.int32),
        loser_ids=np.array([number[loser] for _, _, _, loser in matches], np.int32),
        num_player=len(names),
        tourney_date=np.array([date for date, *_ in matches], np.int32),
        player_names=np.array(names, dtype=np.str_),
    )


def standardise(features: Float64[np.ndarray, "n d"]) -> Float32[np.ndarray, "n d"]:
    """Columns centred and divided by their population standard deviation."""
    return ((features - features.mean(axis=0)) / features.std(axis=0)).astype(np.float32)


def _rows(content: bytes, file: str, separator: str | None, num_fields: int) -> list[list[str]]:
    rows = [line.split(separator) for line in content.decode("ascii").splitlines() if line.strip()]
    for number, row in enumerate(rows, start=1):
        if len(row) != num_fields:
            raise ValueError(f"{file}, row {number}: expected {num_fields} fields, found {len(row)}")
    return rows


def _binary(features: Sequence[Sequence[str]], labels: Sequence[int]) -> Binary:
    raw = np.array(features, dtype=np.float64)
    return Binary(X=standardise(raw), y=np.array(labels, np.int32), X_raw=raw)


def _cifar10_members(archive: Path) -> Iterator[tuple[str, Images]]:
    # In the order of the archive: going back in a compressed stream means starting again.
    with tarfile.open(archive, "r:gz") as members:
        for member in members:
            path = PurePosixPath(member.name)
            stream = members.extractfile(member)
            if stream is not None and path.suffix == ".bin":
                yield path.stem, parse_cifar10_batch(stream.read())


def _genres(content: bytes) -> dict[int, list[int]]:
    rows = [line.split("|") for line in content.decode("latin-1").split("\n") if line.strip()]
    for row in rows:
        if len(row) != ITEM_FIELDS:
            raise ValueError(f"u.item, movie {row[0]}: expected {ITEM_FIELDS} fields, found {len(row)}")
    return {int(row[0]): [int(flag) for flag in row[FIRST_GENRE_FIELD:]] for row in rows}


def _completed_matches(year: bytes) -> Iterator[tuple[int, int, str, str]]:
    # A StringIO with newline="" leaves line ends to csv; str.splitlines would also cut at Latin-1's 0x85.
    table = csv.reader(io.StringIO(year.decode("iso-8859-1"), newline=""))
    header = next(table)
    columns = ("tourney_date", "round", "winner_name", "loser_name", "score", "tourney_level")
    positions = [header.index(column) for column in columns]
    for row in table:
        if not row:
            continue
        date, round_name, winner, loser, score, level = (row[position] for position in positions)
        if (
            winner
            and loser
            and _completed(score)
            and level not in DROPPED_LEVELS
            and round_name in ROUND_ORDER
        ):
            yield int(date), ROUND_ORDER[round_name], winner, loser


def _completed(score: str) -> bool:
    return len(score) >= SHORTEST_SCORE and not UNFINISHED.search(score)
