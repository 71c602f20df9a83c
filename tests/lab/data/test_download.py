# Downloading an archive from a server with moods: what is there afterwards is whole, or nothing takes it for whole.
from __future__ import annotations

import errno
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from lab.data import archives
from lab.data.places import Place, changed
from lab.data.site import HTML, Site, serve

from affine_divergence.lab.data._download import DownloadFailedError
from affine_divergence.lab.data._partial import PartialFile
from affine_divergence.lab.errors import BadInputError, StudyFailedError


def test_an_archive_is_downloaded_unpacked_and_not_asked_for_again(place: Place, site: Site, content: bytes) -> None:
    folder = place.download()
    assert folder == place.folder / archives.FOLDER
    assert place.is_whole()
    assert (place.folder / "archive.tar.gz").read_bytes() == content
    assert place.progress == sorted(place.progress)
    assert place.progress[-1] == (len(content), len(content))
    place.download()
    assert len(site.asked) == 1
    assert "nothing to download" in place.said[-1]


def test_one_byte_changed_is_never_opened_and_the_next_try_starts_afresh(
    place: Place, site: Site, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.content = changed(content)
    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "open", None)
        place.fails(r"what came is not the archive \(SHA-256 .* was wanted\); it was deleted, the next try starts afresh")
    assert len(site.asked) == 1
    assert [file.name for file in place.folder.iterdir()] == [".archive.tar.gz.lock"]
    site.content = content
    place.download()
    assert "Range" not in site.asked[-1]
    assert place.is_whole()


@pytest.mark.parametrize("have", [0, 50_000])
def test_a_web_page_is_named_and_costs_nothing_of_what_is_there(have: int, place: Place, site: Site, content: bytes) -> None:
    place.folder.mkdir(parents=True)
    place.part.write_bytes(content[:have])
    site.content, site.ranges = HTML, False
    place.fails(r"it answers with a web page \(HTML\), not the archive")
    assert place.part.stat().st_size == have


@pytest.mark.parametrize(
    ("length", "extra", "message"),
    [(True, b"more", "it has a file of .* bytes, .* were wanted"), (False, b"more", "it sends more than .* bytes: another file")],
)
def test_a_longer_file_is_refused(length: bool, extra: bytes, message: str, place: Place, site: Site) -> None:
    site.content, site.length = site.content + extra, length
    place.fails(message)
    assert not place.part.exists()


def test_something_that_is_no_gzip_file_is_refused(place: Place, site: Site, content: bytes) -> None:
    site.content = b"PK\3\4" + content[4:]
    place.fails("it answers with no gzip file, it begins with 50 4b 03 04, not the archive")


def test_mirrors_are_tried_in_order_and_before_the_official_address(place: Place, site: Site, content: bytes) -> None:
    with serve(Site(content, status=404)) as gone, serve(Site(content)) as good, serve(Site(content)) as late:
        place.download(mirrors=[gone.url, good.url.removesuffix("archive.tar.gz"), late.url])
        assert [len(each.asked) for each in (gone, good, late, site)] == [1, 1, 0, 0]
        assert good.asked[0]["path"] == "/files/archive.tar.gz"
    assert any("HTTP 404 Not Found; trying the next address" in line for line in place.said)
    assert place.is_whole()


def test_a_mirror_goes_on_with_what_another_began(place: Place, site: Site, content: bytes) -> None:
    with serve(Site(content, always_cut_at=90_000)) as broken:
        place.download(mirrors=[broken.url])
    assert [asked["Range"] for asked in site.asked] == ["bytes=90000-"]
    assert place.is_whole()


@pytest.mark.parametrize("url", ["ftp://host/", "file:///etc/passwd", "host/archive.tar.gz", "http://", "http://a b/", "http://[/", ""])
def test_a_mirror_that_is_no_web_address_is_bad_input(url: str, place: Place) -> None:
    with pytest.raises(BadInputError, match=r"--mirror .*: wanted http://… or https://…"):
        place.download(mirrors=[url])
    assert not place.folder.exists()


def test_offline_one_line_says_what_was_tried_and_the_way_out(place: Place) -> None:
    place.archive = replace(place.archive, url="http://127.0.0.1:9/archive.tar.gz")
    message = place.fails(
        r"archive.tar.gz could not be downloaded \(http://127.0.0.1:9/m/archive.tar.gz: Connection refused; "
        r"http://127.0.0.1:9/archive.tar.gz: Connection refused\); try again later or with --mirror URL, or bring the archive",
        mirrors=["http://127.0.0.1:9/m/"],
    )
    assert f"put it into {place.folder}, or write --data cifar10=PATH" in message
    assert issubclass(DownloadFailedError, StudyFailedError)


def test_a_server_that_falls_silent_is_not_waited_for_for_ever(place: Place, site: Site) -> None:
    site.gate = threading.Event()
    place.fails("no answer in time", timeout=0.2)


def test_a_full_disk_keeps_the_part_and_says_so(place: Place, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    append, room = PartialFile.append, 3

    def full(part: PartialFile, chunk: bytes) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(part, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "append", full)
        place.fails(r"the disk is full at .*place \(No space left on device\); [\d,]+ of [\d,]+ bytes of .* stays: free some space")
    kept = place.part.stat().st_size
    assert kept > 100_000
    place.download()
    assert site.asked[-1]["Range"] == f"bytes={kept}-"
    assert place.is_whole()


def test_a_disk_that_is_full_when_unpacking_keeps_the_archive(place: Place, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "data_batch_3":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(DownloadFailedError, match=r"what is finished of .* stays"):
            place.download()
    assert sorted(file.name for file in place.folder.iterdir()) == [".archive.tar.gz.lock", "archive.tar.gz"]
    place.download()
    assert len(site.asked) == 1
    assert place.is_whole()


def test_a_place_that_cannot_be_used_is_bad_input(place: Place, tmp_path: Path, site: Site) -> None:
    (tmp_path / "new").write_text("")
    with pytest.raises(BadInputError, match=r"cannot use .*: Not a directory; name a folder that can be written to with --to FOLDER"):
        place.download()
    assert site.asked == []


def test_an_archive_put_there_by_hand_is_taken(place: Place, site: Site, content: bytes) -> None:
    place.folder.mkdir(parents=True)
    (place.folder / "archive.tar.gz").write_bytes(content)
    place.download()
    assert site.asked == []
    assert place.is_whole()


def test_a_wrong_archive_put_there_by_hand_is_set_aside(place: Place, content: bytes) -> None:
    place.folder.mkdir(parents=True)
    (place.folder / "archive.tar.gz").write_bytes(content[:-1])
    place.download()
    assert (place.folder / "archive.tar.gz.bad").read_bytes() == content[:-1]
    assert f"is not the official archive ({len(content) - 1:,} bytes, {len(content):,} were wanted)" in place.said[0]
    assert place.is_whole()


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_damaged_folder_is_set_aside_and_unpacked_again(damage: str, place: Place, site: Site) -> None:
    file = place.download() / "data_batch_2"
    file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[:-1])
    place.download()
    (aside,) = place.folder.glob(f"{archives.FOLDER}.bad-*")
    assert (aside / "data_batch_2").exists() == (damage == "short")
    assert place.is_whole()
    assert len(site.asked) == 1


def test_nothing_but_the_expected_files_leaves_an_archive(place: Place, site: Site, files: dict[str, bytes], tmp_path: Path) -> None:
    odd = [tarfile.TarInfo(name) for name in ("../evil", "/tmp/affdiv-evil", "evil", f"{archives.FOLDER}/../../evil", "data_batch_1")]
    link = tarfile.TarInfo(f"{archives.FOLDER}/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    site.content = archives.pack(files, *odd, link)
    place.archive = archives.described(site.content, files, site.url)
    place.download()
    assert place.is_whole()
    assert list(tmp_path.rglob("*evil*")) == []
    assert not Path("/tmp/affdiv-evil").exists()


def test_an_archive_with_a_link_for_a_file_is_refused(place: Place, site: Site, files: dict[str, bytes]) -> None:
    link = tarfile.TarInfo(f"{archives.FOLDER}/test_batch")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    site.content = archives.pack({name: file for name, file in files.items() if name != "test_batch"}, link)
    place.archive = archives.described(site.content, files, site.url)
    with pytest.raises(DownloadFailedError, match="has its checksum, but is an archive without test_batch"):
        place.download()
    assert not (place.folder / archives.FOLDER).exists()


def test_a_member_with_another_checksum_is_refused(place: Place, site: Site, files: dict[str, bytes]) -> None:
    site.content = archives.pack({**files, "data_batch_4": changed(files["data_batch_4"])})
    place.archive = archives.described(site.content, files, site.url)
    with pytest.raises(DownloadFailedError, match="has its checksum, but is an archive whose data_batch_4 has another checksum"):
        place.download()
    assert not (place.folder / archives.FOLDER).exists()


def test_what_a_killed_unpacking_left_is_removed(place: Place) -> None:
    left = place.folder / f".{archives.FOLDER}.unpacking-0123"
    left.mkdir(parents=True)
    (left / "data_batch_1").write_bytes(b"half")
    place.download()
    assert place.is_whole()
