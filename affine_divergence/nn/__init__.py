# Layers: drop-in for torch.nn.
from ._conv import PatchNormConv1d as PatchNormConv1d, PatchNormConv2d as PatchNormConv2d, PatchNormConv3d as PatchNormConv3d
from ._conv_transpose import (
    PatchNormConvTranspose1d as PatchNormConvTranspose1d,
    PatchNormConvTranspose2d as PatchNormConvTranspose2d,
    PatchNormConvTranspose3d as PatchNormConvTranspose3d,
)
from ._linear import AffineLikeLinear as AffineLikeLinear, NormLikeLinear as NormLikeLinear
from ._norm import L2Norm as L2Norm
