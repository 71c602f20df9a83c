# Layers: drop-in for torch.nn.
from ._batch_corrected import (
    BatchCorrectedConv1d as BatchCorrectedConv1d,
    BatchCorrectedConv2d as BatchCorrectedConv2d,
    BatchCorrectedConv3d as BatchCorrectedConv3d,
    BatchCorrectedLinear as BatchCorrectedLinear,
)
from ._conv import PatchNormConv1d as PatchNormConv1d, PatchNormConv2d as PatchNormConv2d, PatchNormConv3d as PatchNormConv3d
from ._conv_transpose import (
    PatchNormConvTranspose1d as PatchNormConvTranspose1d,
    PatchNormConvTranspose2d as PatchNormConvTranspose2d,
    PatchNormConvTranspose3d as PatchNormConvTranspose3d,
)
from ._linear import AffineLikeLinear as AffineLikeLinear, NormLikeLinear as NormLikeLinear
from ._norm import L2Norm as L2Norm
from ._sample_corrected import (
    SampleCorrectedConv1d as SampleCorrectedConv1d,
    SampleCorrectedConv2d as SampleCorrectedConv2d,
    SampleCorrectedConv3d as SampleCorrectedConv3d,
    SampleCorrectedLinear as SampleCorrectedLinear,
)
