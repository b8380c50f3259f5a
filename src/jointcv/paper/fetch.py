"""Canonical files from their public addresses into a cache folder, checked by sha256."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pooch
import requests
from tqdm import tqdm

CACHE_VARIABLE = "JOINTCV_CACHE"
DATA_VARIABLE = "JOINTCV_DATA"
TIMEOUT_SECONDS = 30
CHUNK_BYTES = 1 << 16


class DownloadError(OSError):
    """A canonical file could not be had; the message says which, from where, and what to do."""


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    Args:
        name: the data set, as in a folder's name.
        addresses: folders on the web that hold the same files, each ending in a slash.
        checksums: sha256 by name of file.
    """

    name: str
    addresses: tuple[str, ...]
    checksums: Mapping[str, str]


def cache_folder() -> Path:
    """The folder for downloaded files: `JOINTCV_CACHE`, else the user's cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or pooch.os_cache("jointcv")).expanduser()


def fetch(source: Source, *, progress: bool | None = None, retries: int = 2) -> dict[str, Path]:
    """The files of a data set, from the cache where their checksum is right, else downloaded.

    Args:
        source: what to fetch.
        progress: whether to draw a progress bar; by default, when stderr is a terminal.
        retries: how often to try an address again after a failure.

    Returns:
        The path of each file by its name.

    Raises:
        DownloadError: no address gave a file with the right checksum. The cache then holds no new file.
    """
    show = bool(sys.stderr.isatty()) if progress is None else progress
    single = len(source.checksums) == 1
    downloader = pooch.HTTPDownloader(
        progressbar=show and single, chunk_size=CHUNK_BYTES, timeout=TIMEOUT_SECONDS
    )
    files = tqdm(source.checksums, desc=source.name, unit="file", disable=single or not show)
    with files:
        return {file: _fetch_file(source, file, downloader, retries) for file in files}


def _fetch_file(source: Source, file: str, downloader: pooch.HTTPDownloader, retries: int) -> Path:
    folder = cache_folder() / source.name
    failures = []
    for address in source.addresses:
        # pooch downloads to a temporary name and moves the file only once its checksum is right.
        store = pooch.create(
            path=folder,
            base_url=address,
            registry={file: f"sha256:{source.checksums[file]}"},
            retry_if_failed=retries,
        )
        try:
            return Path(store.fetch(file, downloader=downloader))  # pyright: ignore[reportArgumentType]
        except (requests.RequestException, ValueError) as error:
            failures.append(f"  {address}{file}: {error}")
    raise DownloadError(_advice(source, file, folder / file, failures))


def _advice(source: Source, file: str, path: Path, failures: list[str]) -> str:
    return "\n".join(
        [
            f"could not download {file} of the data set {source.name!r}:",
            *failures,
            f"Either set {DATA_VARIABLE} to a folder with prepared .npz files,",
            f"or download the file by hand to {path}",
            f"(sha256 {source.checksums[file]}).",
        ]
    )
