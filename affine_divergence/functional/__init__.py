# The formulas as pure functions, twins of torch.nn.functional.
from ._conv import (
    affine_like_conv1d as affine_like_conv1d,
    affine_like_conv2d as affine_like_conv2d,
    affine_like_conv3d as affine_like_conv3d,
    norm_like_conv1d as norm_like_conv1d,
    norm_like_conv2d as norm_like_conv2d,
    norm_like_conv3d as norm_like_conv3d,
)
from ._conv_transpose import (
    affine_like_conv_transpose1d as affine_like_conv_transpose1d,
    affine_like_conv_transpose2d as affine_like_conv_transpose2d,
    affine_like_conv_transpose3d as affine_like_conv_transpose3d,
    norm_like_conv_transpose1d as norm_like_conv_transpose1d,
    norm_like_conv_transpose2d as norm_like_conv_transpose2d,
    norm_like_conv_transpose3d as norm_like_conv_transpose3d,
)
from ._linear import affine_like_linear as affine_like_linear, norm_like_linear as norm_like_linear
from ._patches import patch_sqnorm as patch_sqnorm
