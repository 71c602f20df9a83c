# What goes wrong around a run, in real processes: workers that die, too little memory, a full disk, a store that is locked.
from __future__ import annotations

import shutil
import sqlite3
import sys
from pathlib import Path

from makers import STUDY
from running import affdiv, pretending, stored

from affine_divergence.lab.store import FILE

WIDTHS = """
study = "digits"
data = "digits"
[grid]
method = ["none", "affine-like"]
width = [4, 5, 6]
depth = 1
activation = "tanh"
batch_size = 64
learning_rate = [0.1, 0.3]
seed = [0, 1]
epochs = 1
"""
SPOILED = """
def before(trials):
    width = trials[0].width
    if width == 4 and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if width == 5 and len(trials) > 2:
        raise worker.AllocationError("there was no memory")
    if width == 6 and any((t.method, t.seed, t.learning_rate) == ("none", 0, 0.1) for t in trials):
        os._exit(3)
"""


def test_a_worker_that_dies_costs_no_result_and_only_the_trial_that_kills_it_twice_fails_until_it_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(WIDTHS)
    run = affdiv(tmp_path, "run", "grid.toml", "--store", "store", "--workers", "2", command=pretending(tmp_path, SPOILED))
    assert run.returncode == 1, run.stderr
    assert run.stderr.splitlines()[-1] == (
        "affdiv: 1 trials failed, the first with: its worker process died (exit code 3), perhaps for lack of memory, twice; "
        "affdiv resume store goes on from there"
    )
    found = stored(tmp_path / "store")
    sizes = [sorted(r.outcome.stack_size or 0 for r in found.values() if r.trial.width == width) for width in (4, 5, 6)]
    assert sizes == [
        [8] * 8,  # killed once: tried again as it was
        [2] * 8,  # too large: cut in two, and each part again
        [0, 1, 2, 2, 4, 4, 4, 4],  # killed twice: cut in two, down to the trial that does it
    ]
    (failed,) = (record for record in found.values() if record.outcome.status == "failed")
    assert (failed.trial.method, failed.outcome.validation_accuracy, failed.outcome.loss_curve) == ("none", None, [])
    again = affdiv(tmp_path, "resume", "store", "--workers", "1", command=pretending(tmp_path))
    assert again.returncode == 0, again.stderr
    assert "evaluation: 0 of 1 trials" in again.stderr
    now = stored(tmp_path / "store")
    assert now[failed.trial.key].outcome.status == "done"
    del now[failed.trial.key], found[failed.trial.key]
    assert now == found


def test_a_tuning_trial_that_fails_blocks_no_other_cell_and_the_run_ends(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(STUDY)
    spoiled = """
def before(trials):
    if any((t.method, t.width, t.role) == ("none", 4, "tuning") for t in trials):
        raise worker.AllocationError("there was no memory")
"""
    run = affdiv(tmp_path, "run", "grid.toml", "--store", "store", "--workers", "1", command=pretending(tmp_path, spoiled))
    assert run.returncode == 1, run.stderr
    assert "affdiv: 2 trials failed, the first with: there was no memory; affdiv resume" in run.stderr
    tested = {(r.trial.method, r.trial.width) for r in stored(tmp_path / "store").values() if r.trial.role == "evaluation"}
    assert tested == {("none", 5), ("none", 6), ("affine-like", 4), ("affine-like", 5), ("affine-like", 6)}
    again = affdiv(tmp_path, "resume", "store", "--workers", "1", command=pretending(tmp_path))
    assert again.returncode == 0, again.stderr
    assert {r.outcome.status for r in stored(tmp_path / "store").values()} == {"done"}


def test_workers_that_die_before_they_can_train_end_the_run_with_the_reason_and_no_trial_is_blamed(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(WIDTHS)
    for start, said in (
        ("os._exit(7)", "a worker process died while it loaded the data (exit code 7), 3 times in a row; give fewer --workers"),
        ("1 / 0", "a worker process could not start: ZeroDivisionError: division by zero"),
    ):
        spoiled = f"def start(setup): {start}\nworker._start = start\n"
        run = affdiv(tmp_path, "run", "grid.toml", "--store", "store", "--workers", "1", command=pretending(tmp_path, spoiled))
        assert run.returncode == 1, run.stderr
        assert run.stderr.splitlines()[-1] == f"affdiv: {said}; affdiv resume store goes on from there"
        assert stored(tmp_path / "store") == {}


def test_on_a_full_disk_a_run_says_so_and_loses_nothing_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(WIDTHS.replace("[4, 5, 6]", str(list(range(4, 30)))))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, -1))\n"
    full = affdiv(tmp_path, "run", "grid.toml", "--store", "store", "--workers", "1", command=pretending(tmp_path, limit))
    assert full.returncode == 1, full.stderr
    said = full.stderr.splitlines()[-1]
    assert said.startswith("affdiv: the store store/store.sqlite failed: ")
    assert said.endswith("what was finished before is stored: make room on its disk; affdiv resume store goes on from there")
    kept = stored(tmp_path / "store")
    assert 0 < len(kept) < 26 * 8
    assert len(kept) == int(full.stderr.splitlines()[-2].split()[1])
    done = affdiv(tmp_path, "resume", "store", "--workers", "1", command=pretending(tmp_path))
    assert done.returncode == 0, done.stderr
    now = stored(tmp_path / "store")
    assert {key: now[key] for key in kept} == kept
    assert [record.outcome.stack_size for record in now.values()] == [8] * 26 * 8


def test_a_store_locked_by_another_program_ends_the_run_after_a_wait_and_loses_nothing(tmp_path: Path, undisturbed: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "store")
    impatient = "from affine_divergence.lab import store; store.PATIENCE = 1.0; from affine_divergence.cli.main import main; main()"
    other = sqlite3.connect(tmp_path / "store" / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    refused = affdiv(tmp_path, "resume", "store", command=[sys.executable, "-c", impatient])
    assert refused.returncode == 1
    assert "another program has been writing to the store store/store.sqlite for 1 s" in refused.stderr
    assert "close that program; affdiv resume store goes on from there" in refused.stderr
    other.execute("ROLLBACK")
    other.close()
    assert stored(tmp_path / "store") == stored(undisturbed)
