# The formulas as pure functions, twins of torch.nn.functional.
from ._linear import affine_like_linear as affine_like_linear, norm_like_linear as norm_like_linear
