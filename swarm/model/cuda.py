"""What CUDA is asked for, each thing one call of torch. Importing this needs no GPU."""

from __future__ import annotations

import torch
from torch import Tensor


class CudaCard:
    """The card ``cuda:index``, see ``swarm.model.gpu.Card``."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    def computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def pinned(self, like: Tensor) -> Tensor:
        # torch keeps pinned memory that is free for the next one, and asks the streams that copy.
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def empty(self, like: Tensor, stream: torch.cuda.Stream) -> Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(like.shape, dtype=like.dtype, device=self.torch_device)

    def used_on(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Blocking: a thread that waits leaves its core to codecs and the network.
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def block(self, event: torch.cuda.Event) -> None:
        event.synchronize()
