"""Archives of CIFAR: downloaded, continued, checked and unpacked, from a server of the test."""

from __future__ import annotations

import hashlib
import io
import socket
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perfexp.data import cifar_files
from perfexp.data.cifar import Cifar
from perfexp.errors import UserError
from perfexp.host import locks
from tests.data import cifar_folders
from tests.data.cifar_folders import BINARY, COUNT


class Site:
    """A server of one archive, which counts requests and breaks connections on demand.

    Attributes:
        ranges: the header Range of each request.
        breaks_after: bytes after which the next answer ends too early.
    """

    def __init__(self) -> None:
        self.content, self.ranges, self.knows_ranges = b"", [], True
        self.breaks_after: int | None = None
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()

    ranges: list[str]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.ranges.append(request.headers["Range"])
        start = (
            int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if self.knows_ranges
            else 0
        )
        rest = self.content[start:]
        request.send_response(
            416 if self.knows_ranges and not rest else 206 if self.knows_ranges else 200
        )
        request.send_header("Content-Length", str(len(rest)))
        request.end_headers()
        request.wfile.write(rest[: self.breaks_after])
        self.breaks_after = None


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    monkeypatch.setattr(locks, "TEMPORARY", tmp_path)
    site = Site()
    monkeypatch.setattr(cifar_files, "SITE", f"http://127.0.0.1:{site.server.server_port}/")
    yield site
    site.server.shutdown()
    site.server.server_close()


def packed(*extra: tarfile.TarInfo, without: str = "") -> bytes:
    """An archive in the published layout, and further members in front."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for member in extra:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
        for name in BINARY.files:
            if name != without:
                member, content = (
                    tarfile.TarInfo(f"{BINARY.folder}/{name}"),
                    cifar_folders.content(BINARY, name),
                )
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def publish(site: Site, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    site.content = content
    style = replace(BINARY, md5=hashlib.md5(content).hexdigest())
    monkeypatch.setitem(cifar_files.FORMATS, 10, (style, *cifar_files.FORMATS[10][1:]))


def test_missing_data_is_downloaded_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(site, monkeypatch, packed())
    for _ in range(2):
        assert Cifar(root=str(tmp_path / "data"), download=True).num_samples == 5 * COUNT
    assert site.ranges == ["bytes=0-"]
    assert names_in(tmp_path / "data") == {BINARY.archive, BINARY.folder}
    assert names_in(tmp_path / "data" / BINARY.folder) == set(BINARY.files)


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_an_interrupted_download_continues(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knows_ranges: bool
) -> None:
    publish(site, monkeypatch, packed())
    site.breaks_after, site.knows_ranges = 1000, knows_ranges
    with pytest.raises(UserError, match=r"could not be downloaded.*Repeat the command") as caught:
        cifar_files.download(tmp_path, 10)
    assert "\n" not in str(caught.value)
    assert (tmp_path / f"{BINARY.archive}.part").stat().st_size == 1000
    cifar_files.download(tmp_path, 10)
    assert site.ranges == ["bytes=0-", "bytes=1000-"]
    assert cifar_files.find(tmp_path, 10)[2] == []


def test_a_download_that_ended_before_it_was_checked_is_whole(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(site, monkeypatch, packed())
    (tmp_path / f"{BINARY.archive}.part").write_bytes(site.content)
    cifar_files.download(tmp_path, 10)
    assert cifar_files.find(tmp_path, 10)[2] == []


def test_another_checksum_is_refused_and_nothing_is_unpacked(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(site, monkeypatch, packed())
    site.content = b"something else"
    with pytest.raises(UserError, match="another MD5"):
        cifar_files.download(tmp_path, 10)
    assert not list(tmp_path.glob("cifar*"))
    (tmp_path / BINARY.archive).write_bytes(b"something else")
    with pytest.raises(UserError, match=r"another MD5.*Remove it"):
        cifar_files.download(tmp_path, 10)
    assert len(site.ranges) == 1


def test_an_archive_that_lies_there_needs_no_network(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(site, monkeypatch, packed())
    (tmp_path / BINARY.archive).write_bytes(site.content)
    cifar_files.download(tmp_path, 10)
    assert cifar_files.find(tmp_path, 10)[2] == []
    assert not site.ranges


def test_without_a_network_one_line_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setattr(cifar_files, "SITE", f"http://127.0.0.1:{unused.getsockname()[1]}/")
        with pytest.raises(UserError, match="Connection refused") as caught:
            Cifar(root=str(tmp_path / "data"), download=True)
    assert all(
        text in str(caught.value) for text in (BINARY.archive, BINARY.md5, str(tmp_path / "data"))
    )
    assert "\n" not in str(caught.value)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 3 if kind == tarfile.REGTYPE else 0
    return info


def test_names_in_an_archive_decide_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    strange = (
        member("../outside"),
        member(f"{tmp_path}/absolute"),
        member(f"{BINARY.folder}/other"),
    )
    publish(
        site, monkeypatch, packed(*strange, member(BINARY.folder, tarfile.SYMTYPE, str(tmp_path)))
    )
    cifar_files.download(tmp_path / "data", 10)
    assert names_in(tmp_path / "data" / BINARY.folder) == set(BINARY.files)
    assert not (tmp_path / "data" / BINARY.folder).is_symlink()
    assert not [name for name in ("outside", "absolute") if (tmp_path / name).exists()]


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
)
def test_a_member_that_is_not_a_file_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: bytes
) -> None:
    name = f"{BINARY.folder}/test_batch.bin"
    publish(site, monkeypatch, packed(member(name, kind, "/etc/passwd"), without="test_batch.bin"))
    with pytest.raises(UserError, match=f"{name} in .* is not a file"):
        cifar_files.download(tmp_path, 10)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    "content", [packed(without="test_batch.bin"), packed()[:-900], b"no archive"]
)
def test_an_archive_that_is_not_whole_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    publish(site, monkeypatch, content)
    with pytest.raises(UserError, match=r"can't be (unpacked|used)") as caught:
        cifar_files.download(tmp_path, 10)
    assert "\n" not in str(caught.value)
