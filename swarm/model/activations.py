"""What a layer's graph keeps between forward and backward: measured by running the layer once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from swarm.model.spec import TensorSpec

PROBED = 2
"""Samples that a layer is tried with: one alone some layers refuse (batch norm)."""


def saved_bytes(
    module: nn.Module,
    inputs: TensorSpec,
    microbatch: int,
    then: Callable[[Tensor], Tensor] | None = None,
) -> int:
    """Bytes that autograd saves for the backward pass of ``microbatch`` samples through ``module``.

    Parameters and buffers are not counted, they are there anyway; memory that several operations
    save is counted once. ``then``: what follows the layer at once (the loss), which saves more.
    Where the module's numbers are on no device (meta), attention counts its matrix of weights,
    which kernels for the processor do not keep.

    Raises whatever the module raises.
    """
    place = next((p.device for p in module.parameters()), torch.device("cpu"))
    x = torch.zeros(inputs.batch_shape(PROBED), dtype=inputs.torch_dtype, device=place)
    if x.is_floating_point():
        x.requires_grad_()
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = module(x)
        if then is not None:
            then(output)
    return sum(storage.nbytes() for storage in kept.values()) * microbatch // PROBED
