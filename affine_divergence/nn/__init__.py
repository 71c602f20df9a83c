# Layers: drop-in for torch.nn.
from ._conv import PatchNormConv2d as PatchNormConv2d
from ._linear import AffineLikeLinear as AffineLikeLinear, NormLikeLinear as NormLikeLinear
from ._norm import L2Norm as L2Norm
