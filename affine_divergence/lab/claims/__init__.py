# Claims of the paper as tests: their packaged text, read, and judged by what a study found.
from ._obstacles import Member as Member, Obstacle as Obstacle
from ._protocol import Protocol as Protocol
from ._reading import (
    Claim as Claim,
    Claims as Claims,
    Part as Part,
    claims_digest as claims_digest,
    claims_text as claims_text,
    parse_claims as parse_claims,
)
from ._rule import Verdict as Verdict
from ._simulation import simulate as simulate
from ._tendency import Pooled as Pooled, Standing as Standing, Tendency as Tendency
from ._units import Line as Line, Place as Place
from ._verdicts import (
    Comparison as Comparison,
    Judged as Judged,
    Slope as Slope,
    Unit as Unit,
    judge as judge,
)
