# affdiv bench stopping: what a stop rule would have saved of the tuning in finished studies, and what it would have chosen.
#
# The tuning of each study is played again from the stored curves: a stopped trial has the accuracy that it had then, and costs the CPU time
# until then. What a rule makes tuning ask for that was never trained is not known; such a cell counts as one with a worse choice.
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from affine_divergence.lab.costs import steps_an_epoch, steps_of
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.frame import from_frame, read_parquet
from affine_divergence.lab.grid import Grid, grid_of
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.stopping import Rung, Standing, stopped
from affine_divergence.lab.trial import Cell, Trial
from affine_divergence.lab.tuning import Choice, plan

Rule = tuple[Rung, ...]
AS_GOOD = 0.003  # of validation accuracy: a rate no further behind the chosen one counts as good
CHANCE = 0.1  # of ten classes: what a diverged trial scores


def _rule(*rungs: tuple[float, float]) -> Rule:
    return tuple(Rung(after=after, behind=behind) for after, behind in rungs)


RULES = (
    _rule((0.0, 20.0)),
    _rule((0.2, 20.0)),
    _rule((0.0, 15.0), (0.2, 10.0)),
    _rule((0.2, 10.0)),
    _rule((0.5, 10.0)),
    _rule((0.0, 10.0)),
    _rule((0.0, 15.0), (0.2, 10.0), (0.5, 7.0)),
    _rule((0.0, 10.0), (0.3, 8.0)),
    _rule((0.2, 5.0)),
)


@dataclass(frozen=True)
class Replay:
    """A study's tuning by a rule: cells, those with the same choice and with one as good, CPU seconds without and with the rule."""

    cells: int
    same: int
    good: int
    full_seconds: float
    seconds: float

    @property
    def saved(self) -> float:
        return 1.0 - self.seconds / self.full_seconds


def stopping(tables: Sequence[Path]) -> Iterator[str]:
    """The lines of `affdiv bench stopping`, each as soon as it is computed."""
    studies = [_study(table) for table in tables]
    yield "CPU time of tuning saved by a stop rule, and cells whose chosen rate (and damping) is the same, or one whose validation"
    yield f"accuracy was at most {100 * AS_GOOD:g} points lower. rule: from this share of the budget on, so many points behind."
    yield ""
    yield f"{'rule':<30}{'saved':>7}{'same':>8}{'as good':>9}   saved and as good in {', '.join(study.name for study in studies)}"
    for rule in RULES:
        found = [replay(study, rule) for study in studies]
        cells, full = sum(one.cells for one in found), sum(one.full_seconds for one in found)
        same, good = sum(one.same for one in found), sum(one.good for one in found)
        saved = 1.0 - sum(one.seconds for one in found) / full
        each = ", ".join(f"{one.saved:.0%} {one.good}/{one.cells}" for one in found)
        name = ", ".join(f"{rung.after:g}: {rung.behind:g}" for rung in rule)
        yield f"{name:<30}{saved:>7.1%}{same / cells:>8.1%}{good / cells:>9.1%}   {each}"


@dataclass(frozen=True)
class Study:
    """A finished study: its grid, its tuning trials as they ended, and the choices made by them."""

    name: str
    grid: Grid
    outcomes: Mapping[Trial, Outcome]
    choices: Mapping[Cell, Choice]


def _study(table: Path) -> Study:
    text, records, _ = from_frame(read_parquet(table))
    grid = grid_of(text, f"the grid in {table}", [record.trial for record in records])
    outcomes = {record.trial: record.outcome for record in records if record.trial.role == "tuning"}
    if grid.tuning is None or not outcomes:
        raise BadInputError(f"{table} holds no tuning trials; name tables of studies whose learning rates were tuned")
    if grid.tuning.stop is not None:
        raise BadInputError(f"the trials of {table} were stopped early, so their curves are cut; name studies without a stop rule")
    planned = plan(grid, {trial: outcome.validation_accuracy or 0.0 for trial, outcome in outcomes.items()})
    if any(trial.role == "tuning" for trial in planned.missing):
        raise BadInputError(f"the tuning of {table} is not finished; finish the study first")
    return Study(grid.study, grid, outcomes, planned.choices)


def replay(study: Study, rule: Rule) -> Replay:
    """The tuning of a study with a stop rule."""
    told: dict[Trial, float] = {}
    seconds = 0.0
    while stage := [trial for trial in plan(study.grid, told).missing if trial.role == "tuning"]:
        known = [trial for trial in stage if trial in study.outcomes]
        told.update(dict.fromkeys(stage, 0.0))
        for trial, epochs in _lengths(known, study.outcomes, rule).items():
            outcome = study.outcomes[trial]
            seconds += (outcome.cpu_seconds or 0.0) * _share(trial, epochs)
            told[trial] = _score(outcome, epochs)
    choices = plan(study.grid, told).choices
    losses = [_loss(study, cell, choices[cell]) for cell in study.choices]
    full = sum(outcome.cpu_seconds or 0.0 for outcome in study.outcomes.values())
    same = sum(
        (choices[cell].learning_rate, choices[cell].damping) == (old.learning_rate, old.damping) for cell, old in study.choices.items()
    )
    return Replay(len(losses), same, sum(loss <= AS_GOOD for loss in losses), full, seconds)


def _lengths(stage: Sequence[Trial], outcomes: Mapping[Trial, Outcome], rule: Rule) -> dict[Trial, int]:
    # After how many epochs each trial of a stage ends.
    groups: dict[tuple[Cell, int], list[Trial]] = defaultdict(list)
    for trial in stage:
        groups[trial.cell, trial.seed].append(trial)
    lengths = {trial: len(outcomes[trial].loss_curve) for trial in stage}
    for group, members in groups.items():
        left = members
        for epoch in range(1, lengths[members[0]]):
            standings = [Standing(group, outcomes[one].accuracy_curve[epoch - 1], outcomes[one].loss_curve[epoch - 1]) for one in left]
            halted = stopped(rule, _share(members[0], epoch), standings)
            lengths.update((left[place], epoch) for place in halted)
            left = [one for place, one in enumerate(left) if place not in halted]
    return lengths


def _share(trial: Trial, epochs: int) -> float:
    return min(1.0, epochs * steps_an_epoch(trial) / steps_of(trial))


def _score(outcome: Outcome, epochs: int) -> float:
    if epochs == len(outcome.loss_curve):
        return outcome.validation_accuracy or 0.0
    accuracy = outcome.accuracy_curve[epochs - 1]
    return accuracy if math.isfinite(outcome.loss_curve[epochs - 1]) and accuracy > 1.09 * CHANCE else CHANCE


def _loss(study: Study, cell: Cell, choice: Choice) -> float:
    # Of validation accuracy, by the trials as they ended without a rule; infinite where these do not say.
    assert study.grid.tuning is not None
    means = []
    for one in (study.choices[cell], choice):
        trials = [study.grid.tuning.trial(cell, one.learning_rate, seed, one.damping) for seed in study.grid.tuning.seeds]
        if not all(trial in study.outcomes for trial in trials):
            return math.inf
        means.append(fmean(study.outcomes[trial].validation_accuracy or 0.0 for trial in trials))
    return means[0] - means[1]
