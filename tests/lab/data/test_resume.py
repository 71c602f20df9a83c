# Downloads that were broken off: gone on with where the server and the versions allow it, and never joined wrongly.
from __future__ import annotations

import pytest
from lab.data.places import Place, changed
from lab.data.site import Site

from affine_divergence.lab.data._partial import PartialFile


def test_a_connection_that_breaks_is_resumed_where_it_broke_and_on_condition_of_the_same_version(place: Place, site: Site) -> None:
    site.cuts = [70_000]
    place.download()
    assert place.is_whole()
    assert [(asked.get("Range"), asked.get("If-Range")) for asked in site.asked] == [(None, None), ("bytes=70000-", '"one"')]
    assert any("ended after 70,000 of" in line for line in place.said)


@pytest.mark.parametrize(
    ("etag", "modified", "condition"),
    [(None, "Mon, 08 Jun 2009 20:32:33 GMT", "Mon, 08 Jun 2009 20:32:33 GMT"), ('W/"weak"', None, None), (None, None, None)],
)
def test_the_condition_is_a_strong_etag_or_else_the_date(
    etag: str | None, modified: str | None, condition: str | None, place: Place, site: Site
) -> None:
    site.etag, site.modified, site.cuts = etag, modified, [70_000]
    place.download()
    assert site.asked[1].get("If-Range") == condition
    assert place.is_whole()


def test_an_address_that_brings_nothing_new_is_given_up_and_the_next_call_resumes(place: Place, site: Site, content: bytes) -> None:
    half = len(content) // 2
    site.always_cut_at = half
    message = place.fails(f"the connection ended after {half:,} of .*; {half:,} of .* bytes are kept")
    assert "--data cifar10=PATH" in message
    assert len(site.asked) == 2
    assert place.part.stat().st_size == half
    site.always_cut_at = None
    place.download()
    assert site.asked[-1]["Range"] == f"bytes={half}-"
    assert place.is_whole()


def test_a_server_without_ranges_sends_it_all_again(place: Place, site: Site) -> None:
    site.ranges, site.cuts = False, [70_000]
    place.download()
    assert place.is_whole()


def test_a_file_that_changed_is_not_joined_to_the_old_part(place: Place, site: Site) -> None:
    place.folder.mkdir(parents=True)
    PartialFile(place.part).begin(site.url, '"old"')
    PartialFile(place.part).append(b"old" * 20_000)
    place.download()
    assert [(asked["Range"], asked["If-Range"]) for asked in site.asked] == [("bytes=60000-", '"old"')]
    assert place.is_whole()


def test_a_version_known_from_one_server_is_no_condition_for_another(place: Place, site: Site, content: bytes) -> None:
    place.folder.mkdir(parents=True)
    PartialFile(place.part).begin("http://elsewhere/archive.tar.gz", '"theirs"')
    PartialFile(place.part).append(content[:50_000])
    place.download()
    assert [(asked["Range"], asked.get("If-Range")) for asked in site.asked] == [("bytes=50000-", None)]
    assert place.is_whole()


@pytest.mark.parametrize("note", ["", "{", "[]", '{"url": 1}', '{"url": "URL", "version": "a\\nb"}', '{"url": "URL", "version": 3}'])
def test_a_damaged_note_is_no_condition(note: str, place: Place, site: Site, content: bytes) -> None:
    place.folder.mkdir(parents=True)
    place.part.write_bytes(content[:50_000])
    PartialFile(place.part).note.write_text(note.replace("URL", site.url))
    place.download()
    assert "If-Range" not in site.asked[0]
    assert place.is_whole()


def test_a_range_that_is_refused_starts_over(place: Place, site: Site, content: bytes) -> None:
    place.folder.mkdir(parents=True)
    place.part.write_bytes(content[:50_000])
    site.refuse_ranges = True
    place.download()
    assert [asked.get("Range") for asked in site.asked] == ["bytes=50000-", None]
    assert place.is_whole()


@pytest.mark.parametrize("answer", ["bytes 0-9/10", "bytes 50000-99999/100000", "bytes 40000-59999/SIZE", "nonsense"])
def test_a_range_that_is_not_the_rest_is_not_used(answer: str, place: Place, site: Site, content: bytes) -> None:
    place.folder.mkdir(parents=True)
    place.part.write_bytes(content[:50_000])
    site.content_range = answer.replace("SIZE", str(len(content)))
    place.fails("which is not the rest of the archive; the partial file was deleted")
    assert not place.part.exists()


def test_a_part_longer_than_the_archive_is_dropped(place: Place, site: Site, content: bytes) -> None:
    place.folder.mkdir(parents=True)
    place.part.write_bytes(content + b"!")
    place.download()
    assert "Range" not in site.asked[0]
    assert place.is_whole()


def test_a_whole_part_is_checked_and_not_downloaded(place: Place, site: Site, content: bytes) -> None:
    place.folder.mkdir(parents=True)
    place.part.write_bytes(content)
    place.download()
    assert site.asked == []
    assert place.is_whole()


def test_a_part_of_something_else_is_found_out_and_replaced_in_the_same_call(place: Place, site: Site, content: bytes) -> None:
    place.folder.mkdir(parents=True)
    place.part.write_bytes(changed(content)[: len(content) - 1000])
    place.download()
    assert ["Range" in asked for asked in site.asked] == [True, False]
    assert any("what was put together is not the archive" in line for line in place.said)
    assert place.is_whole()


def test_a_server_whose_every_answer_is_wrong_is_asked_twice_and_no_more(place: Place, site: Site, content: bytes) -> None:
    site.content = changed(content)
    place.folder.mkdir(parents=True)
    place.part.write_bytes(content[:1000])
    place.fails("it was deleted, the next try starts afresh")
    assert len(site.asked) == 2


def test_nor_is_one_that_breaks_as_well_asked_for_ever(place: Place, site: Site, content: bytes) -> None:
    site.content, site.cuts = changed(content), [None, 70_000]
    place.folder.mkdir(parents=True)
    place.part.write_bytes(content[:1000])
    place.fails("it was deleted, the next try starts afresh")
    assert len(site.asked) == 3
