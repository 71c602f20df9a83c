# Downloading by several processes at once, and by one that is killed.
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict

from lab.data import archives
from lab.data.places import Place
from lab.data.site import Site

DOWNLOADER = """
import json, sys
from pathlib import Path
from affine_divergence.lab.data import Archive, download
archive, say = Archive(**json.loads(sys.argv[1])), lambda text: print(text, flush=True)
download("cifar10", archive, Path(sys.argv[2]), say=say, progress=lambda *at: None)
"""


def start(place: Place) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", DOWNLOADER, json.dumps(asdict(place.archive)), str(place.folder)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until_half_is_there(place: Place, content: bytes) -> None:
    deadline = time.monotonic() + 30
    while not (place.part.exists() and place.part.stat().st_size > len(content) // 2 - (1 << 16)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_of_two_processes_one_downloads_and_the_other_waits_and_finds_it_done(place: Place, site: Site, content: bytes) -> None:
    site.gate = threading.Event()
    first = start(place)
    wait_until_half_is_there(place, content)
    second = start(place)
    assert second.stdout is not None
    line = second.stdout.readline()
    assert line == f"another process is downloading to {place.folder}: waiting for it\n"
    assert second.poll() is None
    site.gate.set()
    outputs = [process.communicate(timeout=30) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert outputs[1] == (f"{place.folder / archives.FOLDER} is there and whole now\n", "")
    assert len(site.asked) == 1
    assert place.is_whole()


def test_after_a_kill_in_the_middle_nothing_is_taken_for_whole_and_the_next_call_resumes(place: Place, site: Site, content: bytes) -> None:
    site.gate = threading.Event()
    killed = start(place)
    wait_until_half_is_there(place, content)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=30)
    assert {file.name for file in place.folder.iterdir()} == {".archive.tar.gz.lock", "archive.tar.gz.part", "archive.tar.gz.part.json"}
    have = place.part.stat().st_size
    site.gate.set()
    place.download()
    assert site.asked[-1]["Range"] == f"bytes={have}-"
    assert place.is_whole()
