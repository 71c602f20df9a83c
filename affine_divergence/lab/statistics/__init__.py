# Statistics of seeds: intervals, paired tests, families of tests, slopes, power.
from ._families import holm as holm
from ._intervals import Interval as Interval, mean_interval as mean_interval, wilson as wilson
from ._paired import (
    Difference as Difference,
    Evidence as Evidence,
    evidence as evidence,
    paired_difference as paired_difference,
    sign_flip_p as sign_flip_p,
)
from ._power import seeds_for_power as seeds_for_power
from ._slopes import slope as slope
