# A run that is interrupted or killed leaves no process behind, keeps what is finished, says how to go on, and goes on to the same table.
from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from makers import STUDY, TUNED
from running import affdiv, group, pretending, results, started, stored, until, wait_for, workers

from affine_divergence.lab.interrupts import Interrupted, sheltered, stoppable

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


def kill_and_resume(kills: int, seed: int, folder: Path, expected: Path) -> None:
    """Kill coordinator, a worker or everything, `kills` times at random moments; whatever was stored once stays as it was."""
    (folder / "grid.toml").write_text(STUDY)
    draw = random.Random(seed)
    victims = ["coordinator", "worker", "everything"]
    command = ["run", "grid.toml", "--store", "store", "--workers", "2"]
    kept: dict[str, object] = {}
    for kill in range(kills):
        with started(folder, *command) as run:
            time.sleep(draw.uniform(0.5, 6.0))
            if victims[kill % 3] == "worker" and workers(run.pid):
                os.kill(draw.choice(workers(run.pid)), signal.SIGKILL)
                time.sleep(draw.uniform(0.0, 4.0))
            if victims[kill % 3] == "everything":
                os.killpg(run.pid, signal.SIGKILL)
            else:
                run.kill()
            run.wait()
            until(lambda leader=run.pid: group(leader) == [], 5.0)
        if (folder / "store" / "store.sqlite").exists():
            now = stored(folder / "store")
            assert {key: now.get(key) for key in kept} == kept
            kept.update(now)
            if now:
                command = ["resume", "store", "--workers", "1"]
    done = affdiv(folder, *command)
    assert done.returncode == 0, done.stderr
    now = stored(folder / "store")
    assert {key: now.get(key) for key in kept} == kept
    assert results(folder / "store") == results(expected)


def test_a_study_killed_at_three_random_moments_ends_with_the_table_of_an_undisturbed_one(tmp_path: Path, undisturbed: Path) -> None:
    kill_and_resume(3, 20251222, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_studies_killed_thirty_times_end_with_the_table_of_an_undisturbed_one(seed: int, tmp_path: Path, undisturbed: Path) -> None:
    kill_and_resume(3, seed, tmp_path, undisturbed)


def test_ctrl_c_ends_a_run_and_its_workers_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(STUDY)
    second = "def before(trials):\n    if Path('first').exists(): time.sleep(600)\n    Path('first').touch()\n"
    command = pretending(tmp_path, second)
    with started(tmp_path, "run", "grid.toml", "--store", "store", "--workers", "1", command=command) as run:
        wait_for(run, "tuning: [1-9]")
        status = json.loads(affdiv(tmp_path, "status", "store", "--json").stdout)
        assert status["running"] > 0
        assert str(run.pid) in status["writer"]
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        ends(run, 130)
    status = json.loads(affdiv(tmp_path, "status", "store", "--json").stdout)
    assert (status["running"], status["writer"]) == (0, None)
    assert 0 < status["done"] + status["diverged"] < status["total"]


@pytest.mark.parametrize(
    ("slow", "how", "code"),
    [
        ("worker._start = slow", signal.SIGINT, 130),  # while data is loaded
        ("before = slow", signal.SIGTERM, 143),  # while a stack is trained
        ("study.missing = slow", signal.SIGINT, 130),  # while the next round is planned
    ],
)
def test_an_interruption_is_heard_within_five_seconds_whatever_the_run_is_at(
    slow: str, how: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "grid.toml").write_text(TUNED)
    endless = "def slow(*_):\n    print('now', file=sys.stderr, flush=True)\n    while True: sum(range(10**6))\n"
    command = pretending(tmp_path, f"{endless}{slow}\n")
    with started(tmp_path, "run", "grid.toml", "--store", "store", "--workers", "1", command=command) as run:
        wait_for(run, "now")
        if how == signal.SIGINT:
            os.killpg(run.pid, how)
        else:
            run.send_signal(how)
        ends(run, code)


def ends(run: subprocess.Popen[str], code: int) -> None:
    until(lambda: group(run.pid) == [], 5.0)
    assert run.wait() == code
    assert run.stderr is not None
    assert [line for line in run.stderr.read().splitlines() if "trials, " not in line] == [
        "affdiv: interrupted; what was finished is stored, affdiv resume store goes on from there"
    ]


def test_an_interruption_ignored_before_as_under_nohup_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(Interrupted, match="SIGTERM"):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interruption_in_a_shelter_comes_at_its_end_and_once() -> None:
    reached = []
    with stoppable():  # SIGTERM: a shell that started the tests in the background has SIGINT ignored
        with pytest.raises(Interrupted, match="SIGTERM"), sheltered():  # noqa: PT012
            with sheltered():
                signal.raise_signal(signal.SIGTERM)
            reached.append("the end of the outer one")
        with sheltered():
            pass
    assert reached == ["the end of the outer one"]
