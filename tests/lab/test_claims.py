# Claims: their text read, and every verdict from a few accuracies whose answer is worked out by hand.
from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import pytest
from judging import HEAD, Points, block, judged, leads, p_of_three, part
from makers import grid, record
from scipy import stats
from statsmodels.stats.power import TTestPower

from affine_divergence.lab.claims import claims_digest, claims_text, judge, parse_claims
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.store import Record
from affine_divergence.lab.summary import summarise
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import plan

PARITY = "estimand = 'parity'\nmethod = 'affine-like'\nrivals = ['none']\nmargin = 0.0"


def test_the_packaged_claims_are_read_and_named_by_their_hash() -> None:
    text = claims_text()
    claims = parse_claims(text)
    assert [claim.id for claim in claims.claim] == ["C1", "C2", "C3", "C4", "C5", "C7", "C5-conv", "C6", "C8", "P1", "P2", "P3", "P4"]
    assert claims_digest(text) == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert sum(part.verdict for claim in claims.claim for part in claim.part) == 20


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version = 1", "version = 3", "version: input should be 1, 2 or 4, got 3"),
        ("level = 0.05", "level = 5", "level: .* got 5"),
        ('["none"]', '["nothing"]', "C part 1 rivals 1: input should be 'none'.*got 'nothing'"),
        ('["none"]', "[]", "C part 1: above-chance and interior-signal have no rivals"),
        ('["none"]', '["affine-like"]', "rivals are different methods"),
        ("'lead'", "'trend-of-lead'", "along goes with trend-of-lead"),
        ("'lead'", "'batch-slope'", "a comparison along batch_size needs at least two values"),
        ("margin = 0.5", "", "C part 1 margin: field required"),
        ("margin = 0.5", "margins = 0.5\nmargin = 0.5", "C part 1 margins: extra inputs are not permitted"),
        ("[16]", "[16, 16]", "C part 1 cells 1: width holds a value twice"),
        ("margin = 0.5", "margin = 0.5\nverdict = false", "no part decides"),
        ("version = 1", "version = ", "not a TOML file"),
        ("version = 1", "version = 4", "version 4 needs at least one protocol"),
        ("'lead'", "'interior-signal'", "above-chance and interior-signal have no rivals"),
        ("[32]", "[32]\nsignal = [1.0]", "signal goes with interior-signal"),
        ("'lead'", "'parity'", "C part 1: parity claims no direction; leave it out"),
        ("direction = 'greater'", "", 'C part 1: give direction = "greater" or "less"'),
        ("estimand = 'lead'\nmethod = 'affine-like'\nrivals = [\"none\"]\ndirection = 'greater'\nmargin = 0.5", PARITY, "give one above 0"),
        ("[32]", "[32]\npattern = []", "C part 1 cells 1 pattern: .* at least 1 item"),
        ("[32]", "[32]\npattern = ['k4s2']", "C part 1 cells 1 pattern 1: kernels are odd"),
        ('["none"]', '["layer-norm-sample"]', "C part 1: layer-norm-sample is no method of fully-connected nets"),
    ],
)
def test_wrong_claims_are_told_what_is_wrong_where(old: str, new: str, said: str) -> None:
    text = (HEAD + part()).replace("'none'", '"none"')
    assert parse_claims(text).claim[0].id == "C"
    assert old in text
    with pytest.raises(BadInputError, match=said):
        parse_claims(text.replace(old, new, 1))


def test_a_lead_in_every_seed_that_t_finds_is_reproduced() -> None:
    found = judged(part(), block(), leads(1.0, 2.0, 3.0))
    (unit,) = found.units
    (one,) = unit.comparisons
    assert one.evidence is not None
    assert (one.evidence.interval.mean, one.evidence.n) == (pytest.approx(2.0), 3)
    assert one.p == pytest.approx(p_of_three(2 * math.sqrt(3)))
    assert one.opposite_p == pytest.approx(1 - p_of_three(2 * math.sqrt(3)))
    assert one.evidence.p_sign_flip == 0.25
    assert (unit.p, unit.adjusted_p) == (one.p, one.p)
    assert (found.verdict, unit.verdict, unit.obstacles, unit.line.name) == (
        "reproduced",
        "reproduced",
        (),
        "3 × 16, tanh, batch 32, 2 epochs",
    )


def test_it_must_hold_against_each_rival() -> None:
    def points(one: Trial) -> float:
        return {"affine-like": 41.0 + one.seed, "none": 40.0, "batch-norm": 41.5}[one.method]

    found = judged(part(rivals=["none", "batch-norm"]), block(method=["affine-like", "none", "batch-norm"]), points)
    (unit,) = found.units
    assert unit.weakest is not None
    assert (unit.weakest.against, unit.p) == ("batch-norm", pytest.approx(p_of_three(0.5 * math.sqrt(3))))
    assert found.verdict == "undecided"


def test_being_behind_one_rival_contradicts_adjusted_over_all_comparisons() -> None:
    def points(one: Trial) -> float:
        return {"affine-like": 41.0 + one.seed, "none": 39.0, "batch-norm": 45.0}[one.method]

    found = judged(part(rivals=["none", "batch-norm"]), block(method=["affine-like", "none", "batch-norm"]), points)
    assert found.verdict == "contradicted"
    none, norm = found.units[0].comparisons
    p = p_of_three(3 * math.sqrt(3))  # −4, −3, −2
    assert (norm.opposite_p, norm.adjusted_opposite_p) == (pytest.approx(p), pytest.approx(2 * p))
    assert none.adjusted_opposite_p is not None
    assert none.adjusted_opposite_p > 0.9


def test_a_difference_within_the_margin_is_equivalent() -> None:
    half = 2.919986 * 0.1 / math.sqrt(3)  # the 95 % point of Student's t for 2 degrees of freedom
    found = judged(part(margin=round(half + 0.001, 4)), block(), leads(-0.1, 0.1, 0.0))
    assert found.verdict == "equivalent"
    assert judged(part(margin=round(half - 0.001, 4)), block(), leads(-0.1, 0.1, 0.0)).verdict == "undecided"


def test_level_with_one_rival_and_ahead_of_another_is_equivalent_unless_it_may_be_behind_that_one() -> None:
    def points(one: Trial) -> float:
        return {
            "affine-like": 40.0,
            "none": 40.0 + 0.1 * (one.seed - 1),
            "batch-norm": 30.0 + 0.1 * one.seed,
            "rms-norm": 34.0 + 5.0 * one.seed,
        }[one.method]

    blocks = block(method=["affine-like", "none", "batch-norm", "rms-norm"])
    assert judged(part(rivals=["none", "batch-norm"]), blocks, points).verdict == "equivalent"
    assert judged(part(rivals=["none", "rms-norm"]), blocks, points).verdict == "undecided"


def test_an_undecided_unit_says_how_many_seeds_would_decide() -> None:
    values = [1.0, -0.5, 0.7]
    found = judged(part(), block(), leads(*values))
    size = (1.2 / 3) / stats.tstd(values)
    expected = TTestPower().solve_power(effect_size=size, alpha=0.05, power=0.8, alternative="larger")
    assert (found.verdict, found.units[0].seeds) == ("undecided", math.ceil(expected))
    # With a second unit each is tested at half the level.
    two = judged(part(cells={"width": [16, 8]}), block(width=[16, 8]), leads(*values))
    expected = TTestPower().solve_power(effect_size=size, alpha=0.025, power=0.8, alternative="larger")
    assert two.units[0].seeds == math.ceil(expected)
    # What points against the claim is tested in the family of all comparisons: here one unit, but two of them.
    methods = ["affine-like", "none", "batch-norm"]
    behind = judged(part(rivals=methods[1:]), block(method=methods), leads(*(-value for value in values)))
    assert behind.units[0].seeds == math.ceil(expected)
    ahead = judged(part(rivals=methods[1:]), block(method=methods), leads(*values))
    assert ahead.units[0].seeds == found.units[0].seeds


def test_a_rate_at_the_edge_puts_a_unit_beyond_a_verdict_unless_every_rate_ended_at_chance() -> None:
    def points(one: Trial) -> float:
        return leads(1.0, 2.0, 3.0)(one) if one.learning_rate == 0.1 or (one.method == "none" and one.learning_rate != 0.3) else 20.0

    rates = block(learning_rate=[0.03, 0.1, 0.3])
    assert judged(part(), rates, lambda one: points(one) - (one.learning_rate == 0.03)).verdict == "reproduced"
    edge = judged(part(), rates, lambda one: points(one) + (one.method == "none" and one.learning_rate == 0.03))
    assert edge.verdict == "undecided"
    assert [(o.kind, o.detail) for o in edge.units[0].obstacles] == [
        ("rate at the edge", "none at 3 × 16, tanh, batch 32, 2 epochs (learning rate 0.03)")
    ]
    assert (edge.units[0].p, edge.units[0].adjusted_p) == (pytest.approx(p_of_three(math.sqrt(3))), 1.0)

    level = part(margin=40.0)  # a difference within the margin, but a better rate may lie beyond
    assert judged(level, rates, lambda one: 40.0 - one.learning_rate + 0.1 * one.seed * (one.method == "none")).verdict == "undecided"

    def lost(one: Record) -> Record:
        return record(one.trial, 0.1, status="diverged") if one.trial.method == "none" else one

    assert judged(part(), rates, lambda one: points(one) - (one.learning_rate == 0.03), lost).verdict == "reproduced"


def test_what_was_not_run_is_undecided_and_makes_the_family_no_smaller() -> None:
    found = judged(part(cells={"width": [16, 99]}), block(), leads(1.0, 2.0, 3.0))
    run, absent = found.units
    assert [(o.kind, o.detail) for o in absent.obstacles] == [("not run", "the study does not hold it")]
    assert absent.line.name == "3 × 99, tanh, batch 32"
    assert run.adjusted_p == pytest.approx(2 * p_of_three(2 * math.sqrt(3)))
    assert (run.verdict, absent.verdict, found.verdict) == ("undecided", "undecided", "undecided")
    (unit,) = judged(part(rivals=["none", "rms-norm"]), block(), leads(1.0, 2.0, 3.0)).units
    assert [(o.kind, o.detail) for o in unit.obstacles] == [("not run", "rms-norm at 3 × 16, tanh, batch 32, 2 epochs")]
    assert (unit.p, unit.comparisons[1].values) == (None, {})


@pytest.mark.parametrize(("seeds", "said"), [([1], "none at 3 × 16, tanh, batch 32, 2 epochs has one"), ([5, 6], "none shares 0")])
def test_one_seed_or_none_in_common_is_too_few(seeds: list[int], said: str) -> None:
    (unit,) = judged(part(), block(method="affine-like") + block(method="none", seed=seeds), lambda one: 40.0).units
    assert [(o.kind, o.detail) for o in unit.obstacles] == [("too few seeds", said)]
    assert (unit.verdict, unit.p, unit.comparisons[0].evidence) == ("undecided", None, None)


def test_only_seeds_that_both_methods_have_count() -> None:
    found = judged(part(), block(method="affine-like", seed=[0, 1, 2, 3]) + block(method="none"), leads(1.0, 2.0, 3.0, 99.0))
    assert found.units[0].comparisons[0].values == pytest.approx({0: 1.0, 1: 2.0, 2: 3.0})


def test_diverged_runs_count_as_chance() -> None:
    def lost(one: Record) -> Record:
        return record(one.trial, 0.1, status="diverged") if one.trial.method == "none" and one.trial.seed == 1 else one

    found = judged(part(), block(), leads(1.0, 2.0, 3.0), lost)
    assert found.units[0].comparisons[0].values == pytest.approx({0: 1.0, 1: 45.0 - 10.0, 2: 3.0})


def test_above_chance_takes_chance_and_the_margin_off_and_is_contradicted_by_chance_itself() -> None:
    text = part(estimand="above-chance", rivals=[], chance=10.0)
    found = judged(text, block(), lambda one: 12.0 + one.seed)
    assert found.units[0].comparisons[0].values == pytest.approx({0: 1.5, 1: 2.5, 2: 3.5})
    assert (found.verdict, found.units[0].p) == ("reproduced", pytest.approx(p_of_three(2.5 * math.sqrt(3))))
    assert judged(text, block(seed=[0, 1, 2, 3, 4]), lambda one: 10.0).verdict == "contradicted"
    assert judged(text, block(seed=[0, 1]), lambda one: 10.0).verdict == "undecided"  # two equal seeds prove little
    assert judged(text, block(), lambda one: 10.5 + 0.1 * (one.seed - 1)).verdict == "undecided"  # it cannot be equivalent


def test_a_rate_kept_from_its_own_batch_size_does_not_take_seeds_from_the_tuned_cell() -> None:
    tuned = block(learning_rate=[0.01, 0.1, 1.0], seed=[0, 1, 2, 3])
    kept = block(learning_rate=None, rate_from_batch_size=32, seed=[0, 1])
    the_grid = grid(f'study = "s"\ndata = "digits"\nclaims = ["C"]\n{tuned}{kept}[tuning]\nseeds = [9]\n')
    done: list[Record] = []
    while missing := plan(the_grid, {r.trial: r.outcome.validation_accuracy or 0.0 for r in done}).missing:
        done += [record(one, 0.5 - abs(math.log10(one.learning_rate) + 1) / 10 + 0.01 * one.seed) for one in missing]
    (found,) = judge(parse_claims(HEAD + part()), summarise(the_grid, done))
    assert sorted(found.units[0].comparisons[0].values) == [0, 1, 2, 3]


def test_only_budgets_in_epochs_count_but_for_slopes_along_the_batch_size() -> None:
    blocks = block(batch_size=[8, 32]) + block(batch_size=[8, 32], epochs=None, steps=100)
    assert [unit.line.name for unit in judged(part(), blocks, leads(1.0, 2.0, 3.0)).units] == ["3 × 16, tanh, batch 32, 2 epochs"]
    slopes = part(estimand="batch-slope", direction="less", cells={"batch_size": [8, 32]})
    assert [unit.line.name for unit in judged(slopes, blocks, leads(1.0, 2.0, 3.0)).units] == [
        "3 × 16, tanh, batch 8…32, 2 epochs",
        "3 × 16, tanh, batch 8…32, 100 steps",
    ]
    (absent,) = judged(slopes, block(width=8), leads(1.0, 2.0, 3.0)).units
    assert absent.line.name == "3 × 16, tanh, batch 8…32"


def test_a_trend_is_the_slope_by_seed_of_the_lead_over_the_rival_best_on_validation() -> None:
    test = {("affine-like", 4): 41.0, ("affine-like", 16): 46.0, ("none", 4): 40.0, ("none", 16): 45.5, ("batch-norm", 4): 30.0}
    validation = {("none", 4): 50.0, ("none", 16): 20.0, ("batch-norm", 4): 10.0, ("batch-norm", 16): 60.0}

    def one_record(one: Record) -> Record:
        at = (one.trial.method, one.trial.width)
        bend = one.trial.seed * 2.0 if at == ("affine-like", 16) else 0.0
        accuracy = (test.get(at, 42.0) + bend) / 100  # batch-norm at 16 has 42 and the best validation
        return record(one.trial, accuracy, validation_accuracy=validation.get(at, 30.0) / 100)

    text = part(estimand="trend-of-lead", along="width", rivals=["none", "batch-norm"], cells={"width": [4, 16]})
    found = judged(text, block(width=[4, 16], method=["affine-like", "none", "batch-norm"]), lambda one: 40.0, one_record)
    (unit,) = found.units
    (one,) = unit.comparisons
    assert one.against == "best other method (none, batch-norm)"
    assert one.values == pytest.approx({0: (4 - 1) / 2, 1: (6 - 1) / 2, 2: (8 - 1) / 2})  # from width 4 to 16 there are two doublings
    assert (found.verdict, unit.p) == ("reproduced", pytest.approx(p_of_three(2.5 * math.sqrt(3))))
    deep = part(estimand="trend-of-lead", along="depth", cells={"depth": [1, 3], "width": [4, 16]})
    lines = judged(deep, block(width=[4, 16], depth=[1, 3]), leads(1.0, 2.0, 3.0)).units
    assert [unit.line.name for unit in lines] == ["1…3 × 4, tanh, batch 32, 2 epochs", "1…3 × 16, tanh, batch 32, 2 epochs"]
    assert lines[0].line.x == (1.0, 3.0)
    assert lines[0].comparisons[0].p == 1.0  # no slope at all, in no seed


def test_a_line_with_a_hole_is_not_judged() -> None:
    text = part(estimand="trend-of-lead", along="width", cells={"width": [4, 16]})
    (unit,) = judged(text, block(), leads(1.0, 2.0, 3.0)).units
    assert [(o.kind, o.detail) for o in unit.obstacles] == [("not run", "3 × 4, tanh, batch 32, 2 epochs")]


BATCHES: Mapping[str, float] = {"affine-like": -1.0, "none": 0.5}


def by_batch(one: Trial) -> float:
    return 40.0 + (BATCHES[one.method] - (0.1 * one.seed if one.method == "affine-like" else 0.0)) * math.log2(one.batch_size)


def test_a_batch_slope_is_a_difference_of_slopes_in_the_claimed_direction() -> None:
    text = part(estimand="batch-slope", direction="less", margin=0.1, cells={"batch_size": [8, 32, 128]})
    found = judged(text, block(batch_size=[8, 32, 128]), by_batch)
    (unit,) = found.units
    assert unit.comparisons[0].values == pytest.approx({0: -1.5, 1: -1.6, 2: -1.7})
    assert (found.verdict, unit.p) == ("reproduced", pytest.approx(p_of_three(1.6 / 0.1 * math.sqrt(3))))
    slopes = {one.method: one.slope for one in unit.slopes}
    assert all(one.curvature and one.curvature.mean == pytest.approx(0.0, abs=1e-9) for one in unit.slopes)  # straight lines
    assert (slopes["none"].mean, slopes["affine-like"].mean) == (pytest.approx(0.5), pytest.approx(-1.1))
    text = text.replace("'less'", "'greater'")
    assert judged(text, block(batch_size=[8, 32, 128]), by_batch).verdict == "contradicted"
    # A slope within the margin of the rival's.
    equal = part(estimand="batch-slope", direction="less", margin=2.0, cells={"batch_size": [8, 32, 128]})
    assert judged(equal, block(batch_size=[8, 32, 128]), lambda one: by_batch(one) * (one.seed - 1) / 10 + 40).verdict == "equivalent"


def test_a_slope_level_with_one_rival_and_below_another_as_claimed_is_equivalent() -> None:
    def points(one: Trial) -> float:
        own = {"affine-like": -0.02 * (one.seed - 1), "none": 0.0, "batch-norm": 3.0 + 0.1 * one.seed}[one.method]
        return 40.0 + own * math.log2(one.batch_size)

    cells = {"batch_size": [8, 32, 128]}
    text = part(estimand="batch-slope", direction="less", margin=0.1, rivals=["none", "batch-norm"], cells=cells)
    blocks = block(batch_size=[8, 32, 128], method=["affine-like", "none", "batch-norm"])
    assert judged(text, blocks, points).verdict == "equivalent"
    assert judged(text.replace("'less'", "'greater'"), blocks, points).verdict == "contradicted"


def test_settings_at_a_kept_rate_are_apart_and_hold_the_batch_size_whose_rate_is_kept() -> None:
    tuned = block(batch_size=[8, 32], learning_rate=[0.03, 0.1, 0.3]) + block(batch_size=8, learning_rate=None, rate_from_batch_size=32)
    blocks = tuned + "[tuning]\nseeds = [10]\n"
    the_grid = grid(f'study = "s"\ndata = "digits"\nclaims = ["C"]\n{blocks}')
    best = {8: 0.1, 32: 0.1}
    records: list[Record] = []
    while missing := plan(the_grid, {r.trial: r.outcome.validation_accuracy or 0.0 for r in records}).missing:
        records += [record(t, 0.4 if t.learning_rate == best[t.batch_size] else 0.3) for t in missing]
    kept = part(estimand="batch-slope", direction="less", cells={"batch_size": [8, 32], "rate_from_batch_size": 32})
    (found,) = judge(parse_claims(HEAD + kept), summarise(the_grid, records))
    (unit,) = found.units
    assert (unit.line.name, unit.obstacles) == ("3 × 16, tanh, batch 8…32, 2 epochs, rate of batch 32", ())
    assert unit.comparisons[0].values == {0: 0.0, 1: 0.0, 2: 0.0}


def test_a_part_that_decides_nothing_is_shown_and_belongs_to_no_family() -> None:
    text = part() + part(verdict=False, cells={"width": [8]})
    found = judged(text, block(width=[16, 8]), lambda one: leads(1.0, 2.0, 3.0)(one) if one.width == 16 else 50.0 - leads(1, 2, 3)(one))
    decides, shown = found.units
    assert (found.verdict, decides.adjusted_p) == ("reproduced", decides.p)
    assert (shown.verdict, shown.adjusted_p, shown.comparisons[0].adjusted_opposite_p) == (None, None, None)
    assert shown.comparisons[0].opposite_p == pytest.approx(p_of_three(2 * math.sqrt(3)))


def test_a_claim_is_reproduced_by_all_units_contradicted_by_one_and_equivalent_by_a_mixture() -> None:
    large, small = leads(1.0, 1.1, 1.2), leads(-0.01, 0.01, 0.0)
    text, blocks = part(cells={"width": [16, 8]}), block(width=[16, 8])
    mixtures: list[tuple[Points, str]] = [
        (large, "reproduced"),
        (lambda one: large(one) if one.width == 16 else small(one), "equivalent"),
        (lambda one: large(one) if one.width == 16 else 80.0 - large(one), "contradicted"),
        (lambda one: large(one) if one.width == 16 else leads(1.0, -0.5, 0.7)(one), "undecided"),
    ]
    for points, verdict in mixtures:
        assert judged(text, blocks, points).verdict == verdict
