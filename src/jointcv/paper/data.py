"""The data sets of the paper: from prepared files, else from their canonical addresses.

If the environment variable `JOINTCV_DATA` names a folder, its `.npz` files are used. Otherwise the
canonical files are downloaded once to the folder `JOINTCV_CACHE` (by default the user's cache folder),
checked and parsed.
Tennis is CC BY-NC-SA 4.0 (Jeff Sackmann / Tennis Abstract) and MovieLens is for research only (Harper and
Konstan, 2015; GroupLens): neither may be redistributed with this package.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jointcv.paper.fetch import DATA_VARIABLE, Source, fetch
from jointcv.paper.parse import (
    CIFAR10_TEST,
    CIFAR10_TRAIN,
    Binary,
    Cifar10,
    Images,
    Mnist,
    MovieLens,
    Tennis,
    join_cifar10,
    parse_australian,
    parse_cifar10,
    parse_mnist,
    parse_movielens,
    parse_sonar,
    parse_tennis,
)

Record = TypeVar("Record")

SONAR = Source(
    name="sonar",
    addresses=(
        "https://archive.ics.uci.edu/ml/machine-learning-databases/undocumented/connectionist-bench/sonar/",
    ),
    checksums={"sonar.all-data": "e90434cdbf00fcf93ffa911fe447ae25606979658e60f1d32e155c3b5240234d"},
)
AUSTRALIAN = Source(
    name="australian",
    addresses=("https://archive.ics.uci.edu/ml/machine-learning-databases/statlog/australian/",),
    checksums={"australian.dat": "3abe5af151afa50b999a9ba21cbc884e80d80a4050b716cf88b34a2e6ecb731c"},
)
MNIST = Source(
    name="mnist",
    addresses=(
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
    ),
    checksums={
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
)
MOVIELENS = Source(
    name="movielens",
    addresses=("https://files.grouplens.org/datasets/movielens/",),
    checksums={"ml-100k.zip": "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229"},
)
CIFAR10 = Source(
    name="cifar10",
    addresses=("https://www.cs.toronto.edu/~kriz/",),
    checksums={"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
)

FIRST_TENNIS_YEAR = 1968
TENNIS_CHECKSUMS = """
c932496e3c3c8e8e8c97c2f8403c9e54b0a0d7966bf32e149051138973c77cbf
3f67c7c5c1e35479c1030cf03839613133948bb16f11d21e3ec6eaa7d9f00345
4de43ab8539a6de62622ddfc13f74ad547cd059be81873b18c329791b91bb1ea
0e3d1e8bccc0932350be31e33231a475030357edd4774154055be19a4cc95a5c
fd204dc66028428f72c3c73f80bc491a848caa521f0651c08bd6a6f3165f1d96
5d741f3e3599d8c1a51903ce17fbf9098086035ee47d91401a3ead48de28ca6e
62bedf9e5cbed83f8ba5644eb83b4e3b1dee1af992feace70548c172d27f868f
cb16bcd7c9446bcdca083c66bf5a2c958a4f4b81300d5b4fba4dc316ad542db2
a9d4ecb7eefe8d0cba84bd213c7af24b0fd42b1836e56f1c4b7d1b2fb09443c7
b54f4e514b0eb365fdafe5a4827d9fe146e5ef8b0e13cf14574e48ad0c21bfed
7955bea29dd6c4ee81b74f85f372425354c9fbc96fec6f66224165e372a971c1
43a17fe1a399135a0f3227f88fedc8b61e0f9157400d559c218dd2fb918b168b
53a287e4de0fadef2d62c9a59fbcfb5cf240e4895d1dd2f6ee7bae5fd0dc67f2
c3788311ebbfec480dab2f1bd605bef246a7b08370a5ffa89404065256b555c7
5542264542e6e0f088ad8e40f7d2e9a92c2a4ee56e8afba46c368d46628f0ebf
2e717cf01f6e24d1628a878f67a1d0bf5351dd0e2872517a7e73c69d5dc80c19
3ae9206dfc13562893a653d29295df702fc83b039cce9a7c66249300311f8d03
fe42eedfbf17d8af2f6f73b5a251b3abb5ef79f5baaf376250a6f2f297417fe7
cfdbb5d8253edf3c81325047096f296d85306026d57524e86f84f1dd879e5054
4f8c2947b0ae305d9afbedad7ae44b82ce426cd5d5b8b2835778073fd721febb
7da1eb2691c5a992648529f89d6564a685baf7150d37a0143d5599a9f3f48fd7
f059a3423e2bb986215311a2ec9cac3f4bab9a76bd1167be711de37470d977e9
4c65abf16c98f1a96634bdc464961f058555677539203cd23b50031155fa037c
8366632e1d874fcfb700017d8ff8bf59fe05e25e44ca86dfcfb314a198d303a0
b2ede0ff352a34e59b9cdc0e2a7c9af764a6fe6ac7326a09c4c923f5736b7922
ad841411059f2cd753ec672052db38ddfc916c87d9db33c94bc7338f733c9676
cf989080b15fdc1376da96172613f93337ddbc316ce63feb05220f344d5a2dc9
bcfbbf40c5c774167a7a3e8e821e64368b83e58cbf736924d401e6a7edea4b27
ef8fab3af019de1a3d38d63b235dcf424d0e93f0c8c9947c915e258e899a0b92
d3eebf2e646a25e97e812f1feece2a4afc14651debef6ce183b44b0aa3a7a3ef
207e9d5d76f7bd0bdfdeb1de1c0272352a3f885e698ed10c3d3054bd0ad31593
0f618bc71d71b11ad9396b3506e86a665c86b37b220dd9a0edae5453f57d519f
a2176b0d9e70f238536d0a2d0957bc54dc1bfbfb47c368d8f3cbe28457b5ebe4
b07bcb7e7239fb451eae6b4e99ef9a0c892083a21185405c8627d5edc9a113be
6dbff3e670a576f5f8a0586dc67ffd9394bb9dd87ba964f98d11029303e544ce
387a1dec62d014fdf5c7dc83329b87c3a4041fc4ebf8a25b19352c82d1f67c31
79251fec7d9751ea2eebb005a962f69fea466f827172d53f47b381aac53634af
7ab77584b319b65830d4b5c988cf8349d14a7a4e867633e9717801f8d9b97b27
c7f28866e127c665072ed6e4a8fc5812cd82f804660fbdd37e8b00063d1b8f53
d392402109561d6d3e19fd41dc8cc3a3f72ccb52d3988edbe7c18cc47b603db0
0df26c39db9d28b762f9c9f8d48a59af2bfc68302a45230b9a0236c076e4dff0
71053c10b4b4930deb0468020f741ee86969ae60cb3f716e2c3135c6d639887c
135a4a1e2ab69c33318b6e5ad59efc67cc5358629b15bf28fb2f905d48f7aeb0
eddf7c46f508932f071bd8ddd779ca29949291a2233d092656054f612611c241
9db62e0e32a5763cf51bcda01b98e2a473d95e04778c53a4f0d58d4ad0383d12
d6373226439ae46680529e55a0fa5b82d6c4e977581ba8d80798a3204121e9fb
0f952135a032f171810a913be8b6eed195d0ebd561ecdd647d907f3fec623c32
21db5a7d16f783c80d322b96f4196fa406ec42a9880ae8439de543a12a77563a
c5823058a83b5ef110de475fadcb2fb1b9ae5eef479f1d8fb420bb9da7430e59
2bcd55b3eb6c8cbdd395bad7e9fbc788ec4101099e6b1e84e9301ebed451d7fc
b452c378603e7db46cbf51ca1a3ccfd02bcbd7074bd29bb6922ba401d8623273
2a12cc4a18f46da3fbfcfb223d6e4ebd0548cbe5742d67cc1423a51c45855561
4d29b7506a664b0e30070ae45ebc0170231aa866c34d08756ea2c6cb8f15b4a5
68afaea11bbd5867b08b84fb720798efff6462ff2a398b8e8060711ea282247e
fd971b99819d431d0df28c211341dfedae060eec14290b55db7829b69afbb542
78f9c32317ad0e09974f52880c539f6607505d07e761f8e82eca22e21da498ba
""".split()
TENNIS = Source(
    name="tennis",
    addresses=(
        "https://raw.githubusercontent.com/JeffSackmann/tennis_atp/0f917b87fe55f6fa2c3db6e846fa70f0be879110/",
    ),
    checksums={
        f"atp_matches_{year}.csv": checksum
        for year, checksum in enumerate(TENNIS_CHECKSUMS, FIRST_TENNIS_YEAR)
    },
)


def load_sonar(*, progress: bool | None = None) -> Binary:
    """Sonar: rock (1) or mine (0) from 60 standardised features, 208 rows.

    Args:
        progress: whether a download draws a progress bar; by default, when stderr is a terminal.
    """
    return _load(Binary, "sonar.npz", SONAR, progress, lambda files: parse_sonar(_only(files).read_bytes()))


def load_australian(*, progress: bool | None = None) -> Binary:
    """Australian credit: 14 standardised features (categorical codes too, as plain numbers), 690 rows.

    Args:
        progress: whether a download draws a progress bar; by default, when stderr is a terminal.
    """
    return _load(
        Binary,
        "australian.npz",
        AUSTRALIAN,
        progress,
        lambda files: parse_australian(_only(files).read_bytes()),
    )


def load_mnist(*, progress: bool | None = None) -> Mnist:
    """MNIST: 60,000 + 10,000 digits, pixels as published.

    Args:
        progress: whether a download draws a progress bar; by default, when stderr is a terminal.
    """

    def parse(files: Mapping[str, Path]) -> Mnist:
        return parse_mnist(*(files[file].read_bytes() for file in MNIST.checksums))

    return _load(Mnist, "mnist.npz", MNIST, progress, parse)


def load_tennis(*, progress: bool | None = None) -> Tennis:
    """Tennis: 169,405 matches of 5,524 players; every row is a win of `winner_ids`.

    Args:
        progress: whether a download draws a progress bar; by default, when stderr is a terminal.
    """

    def parse(files: Mapping[str, Path]) -> Tennis:
        return parse_tennis(files[file].read_bytes() for file in TENNIS.checksums)

    return _load(Tennis, "tennis.npz", TENNIS, progress, parse)


def load_movielens(*, progress: bool | None = None) -> MovieLens:
    """MovieLens-100K: 100,000 ratings of movies with 18 genre flags by 943 users.

    Args:
        progress: whether a download draws a progress bar; by default, when stderr is a terminal.
    """
    return _load(
        MovieLens, "movielens100k.npz", MOVIELENS, progress, lambda files: parse_movielens(_only(files))
    )


def load_cifar10(*, progress: bool | None = None) -> Cifar10:
    """CIFAR-10: 50,000 + 10,000 colour images, in the order of the official batches.

    Args:
        progress: whether a download draws a progress bar; by default, when stderr is a terminal.
    """
    folder = _prepared_folder()
    if folder is None:
        return parse_cifar10(_only(fetch(CIFAR10, progress=progress)))
    batches = [_prepared(Images, folder / f"cifar10_{name}.npz") for name in (*CIFAR10_TRAIN, CIFAR10_TEST)]
    return join_cifar10(batches[:-1], batches[-1])


def _load(
    record: type[Record],
    prepared: str,
    source: Source,
    progress: bool | None,
    parse: Callable[[Mapping[str, Path]], Record],
) -> Record:
    folder = _prepared_folder()
    if folder is None:
        return parse(fetch(source, progress=progress))
    return _prepared(record, folder / prepared)


def _only(files: Mapping[str, Path]) -> Path:
    (path,) = files.values()
    return path


def _prepared_folder() -> Path | None:
    folder = os.environ.get(DATA_VARIABLE)
    return Path(folder).expanduser() if folder else None


def _prepared(record: type[Record], path: Path) -> Record:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist. The environment variable {DATA_VARIABLE} says to look there: put "
            "the file in that folder, or unset the variable to download the canonical files."
        )
    names = [field.name for field in dataclasses.fields(record)]  # pyright: ignore[reportArgumentType]
    with np.load(path) as arrays:
        missing = [name for name in names if name not in arrays.files]
        if missing:
            raise ValueError(
                f"{path} (from {DATA_VARIABLE}) has no array {missing[0]!r}; it has {arrays.files}"
            )
        return record(**{name: _plain(arrays[name]) for name in names})


def _plain(array: np.ndarray) -> Any:
    return array.item() if array.ndim == 0 else array
