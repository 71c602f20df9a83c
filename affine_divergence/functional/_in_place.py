# When a layer may write into a tensor that an operation returned to it.
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def may_overwrite() -> bool:
    """Whether nobody else can hold the result of an operation: no dispatch mode is active.

    A dispatch mode sees every operation. Selective activation checkpointing keeps results in one and raises if they change.
    """
    return not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product of a and b, written into a if nobody else can hold it. b must broadcast to the shape of a, in no wider dtype."""
    return a.mul_(b) if may_overwrite() else a * b


def as_base(z: Tensor) -> Tensor:
    """The same values as a tensor that is not a view. A Function that returns a view forbids in-place operations on its output."""
    # The result of _unsafe_view has its own version counter: a mode that holds z would not notice that its values change.
    base: Tensor = torch.ops.aten._unsafe_view(z, z.shape) if may_overwrite() or torch.compiler.is_compiling() else z.clone()
    return base
