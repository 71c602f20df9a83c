# Corrections of the gradient alone: torch's own outputs, and gradients of weight and bias that move the activations as they ask.
from ._batch_conv import (
    batch_corrected_conv1d as batch_corrected_conv1d,
    batch_corrected_conv2d as batch_corrected_conv2d,
    batch_corrected_conv3d as batch_corrected_conv3d,
)
from ._batch_linear import batch_corrected_linear as batch_corrected_linear
from ._sample import sample_corrected_linear as sample_corrected_linear
from ._sample_conv import (
    sample_corrected_conv1d as sample_corrected_conv1d,
    sample_corrected_conv2d as sample_corrected_conv2d,
    sample_corrected_conv3d as sample_corrected_conv3d,
)
