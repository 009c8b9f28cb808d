"""Whether tensors are finite, asked without waiting for each answer.

A probe is a tensor of one element that is finite if the values it stands for are. Only if it is
not does anybody look closer: finite values may have a sum that is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarm.model.device import Device


def sum_probe(tensors: Sequence[Tensor]) -> Tensor | None:
    """Finite only if all values are; None if there are none."""
    found = [tensor.sum() for tensor in tensors if tensor.numel()]
    if len(found) < 2:
        return found[0] if found else None
    return torch.stack(found).sum()


def size_probe(tensors: Sequence[Tensor]) -> Tensor | None:
    """The largest magnitude, NaN if any value is; None if there are none."""
    found = [tensor.abs().max() for tensor in tensors if tensor.numel()]
    return torch.stack(found).max() if found else None


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """A close look: each is waited for."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def look_for(device: Device, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
    """For each name a number that is finite if its tensor is: all of them in one readback.

    Of one element, the tensor itself; of None and of integers 0.
    """
    asked = {
        name: tensor if tensor.numel() == 1 else tensor.sum()
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_floating_point()
    }
    found = dict.fromkeys(tensors, 0.0)
    found |= dict(zip(asked, device.read(list(asked.values())), strict=True))
    for name in asked:
        tensor = tensors[name]
        assert tensor is not None
        if not math.isfinite(found[name]) and tensor.numel() != 1 and all_finite([tensor]):
            found[name] = 0.0
    return found
