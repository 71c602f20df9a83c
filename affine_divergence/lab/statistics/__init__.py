# Statistics of seeds: intervals, paired tests, families of tests, slopes, power, tests against a margin.
from ._families import holm as holm
from ._intervals import Interval as Interval, mean_interval as mean_interval, wilson as wilson
from ._margins import MarginP as MarginP, margin_p as margin_p, parity_power as parity_power, seeds_for_parity as seeds_for_parity
from ._paired import (
    Difference as Difference,
    Evidence as Evidence,
    evidence as evidence,
    paired_difference as paired_difference,
    sign_flip_p as sign_flip_p,
)
from ._power import seeds_for_power as seeds_for_power
from ._slopes import curvature as curvature, slope as slope
