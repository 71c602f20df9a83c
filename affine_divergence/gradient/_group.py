# The processes that share one Gram matrix: what they tell each other in a backward.
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Group:
    """A process group, which copies of a layer share and which no file can hold."""

    def __init__(self, process_group: Any) -> None:
        if not dist.is_available() or not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a torch.distributed.ProcessGroup or None, got {type(process_group).__name__}; "
                "torch.distributed.group.WORLD is the one of all processes, once torch.distributed.init_process_group has been called"
            )
        self.process_group = process_group

    def counts(self, rows: int, device: torch.device) -> list[int]:
        """The number of rows of every process, in their order."""
        own = torch.tensor([rows], device=device)
        every = [torch.empty_like(own) for _ in range(self._size())]
        dist.all_gather(every, own, self.process_group)
        return [int(count) for count in torch.cat(every).tolist()]

    def gathered(self, rows: Float[Tensor, "groups own k"], counts: list[int]) -> Float[Tensor, "groups all k"]:
        """The rows of all processes."""
        sent = rows.new_zeros(rows.shape[0], max(counts), rows.shape[2])  # equal shapes are all that the backends exchange
        sent[:, : rows.shape[1]] = rows
        every = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(every, sent, self.process_group)
        return torch.cat([part[:, :count] for part, count in zip(every, counts, strict=True)], 1)

    def own(self, rows: Float[Tensor, "groups all k"], counts: list[int]) -> Float[Tensor, "groups own k"]:
        """Of the rows of all processes, those of this one."""
        rank = dist.get_rank(self.process_group)
        return rows.narrow(1, sum(counts[:rank]), counts[rank])

    def summed(self, *tensors: Tensor) -> list[Tensor]:
        """The sums of these tensors, which have one dtype, over all processes: one message."""
        message = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(message, group=self.process_group)
        parts = message.split([tensor.numel() for tensor in tensors])
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _size(self) -> int:
        return dist.get_world_size(self.process_group)

    def __repr__(self) -> str:
        return f"{self._size()} processes"

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a layer with a process_group cannot be pickled: the group belongs to the running processes; "
            "save the state_dict, or set layer.process_group = None before and the group again after loading"
        )
