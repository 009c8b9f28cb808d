"""Where a stage computes, and what differs between a GPU and the host's own processor.

Few things do: how tensors come and go, how numbers are read back, and where memory lies that the
network reads. On the CPU tensors are there already, and nothing is copied or waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A tensor on its way."""

    def wait(self) -> Tensor:
        """The tensor, of which everything has arrived, or has for whatever is computed next.

        On its way to the device it is waited for by the thread that computes, in no time: the
        device puts its work behind the copy. On its way to the host the thread stands still, so it
        is never that of the event loop.
        """
        ...


class Device(Protocol):
    """What a ``StageModel`` computes on."""

    torch_device: torch.device
    copies: bool
    """Whether tensors have to be copied to get here and away. If not, ``wait`` costs nothing and
    may be called anywhere."""
    words: str
    """What people call it."""
    memory_bytes: int | None
    """Free for a stage when it was chosen. None: it is the host's, which changes."""

    def to_device(self, tensor: Tensor) -> Copy:
        """Begin to copy ``tensor``, which is in the host's memory, here. From any thread."""
        ...

    def to_host(self, tensor: Tensor) -> Copy:
        """Begin to copy ``tensor`` to the host, as what was computed up to now leaves it.

        By the thread that computes. Until it is waited for, ``tensor`` must not change.
        """
        ...

    def read(self, scalars: Sequence[Tensor]) -> list[float]:
        """The values of tensors of one element, of any dtype: all of them in one readback.

        By the thread that computes: it stands still until all that was computed is done.
        """
        ...

    def room(self, like: Tensor) -> Tensor:
        """Memory of the host, as large as ``like``, from which copies to here are fast."""
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """A tensor that need not go anywhere."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


class Cpu:
    """The host's processor: what is copied is never more than a reference."""

    torch_device = torch.device("cpu")
    copies = False
    words = "cpu"
    memory_bytes: int | None = None

    def to_device(self, tensor: Tensor) -> Copy:
        return Here(tensor)

    def to_host(self, tensor: Tensor) -> Copy:
        return Here(tensor)

    def read(self, scalars: Sequence[Tensor]) -> list[float]:
        return [float(scalar.item()) for scalar in scalars]

    def room(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)


CPU = Cpu()


def snapshot(device: Device, tensor: Tensor) -> Tensor:
    """A copy in the host's memory that nothing changes any more. By the thread that computes."""
    found = device.to_host(tensor).wait()
    return found if device.copies else found.clone()
