"""A GPU as a ``Device``: pinned buffers on the host, a stream for each direction beside computing.

What is copied to it waits for nobody, so it comes while the microbatch before is computed. What is
copied from it comes after what was computed up to then, while the next one is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Card(Protocol):
    """What a GPU's driver is asked for. Its streams are told apart, and otherwise opaque."""

    torch_device: torch.device
    name: str

    def free_bytes(self) -> int:
        """Of its memory."""
        ...

    def stream(self) -> Any:
        """A new queue of work beside the others."""
        ...

    def computing(self) -> Any:
        """The stream on which torch computes in this thread."""
        ...

    def pinned(self, like: Tensor) -> Tensor:
        """Memory of the host that the card reaches by itself. Freed after copies that use it."""
        ...

    def empty(self, like: Tensor, stream: Any) -> Tensor:
        """Memory of the card, to be written on ``stream``."""
        ...

    def used_on(self, tensor: Tensor, stream: Any) -> None:
        """``tensor`` is used on ``stream`` too: its memory is nobody else's before that is over."""
        ...

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Begin a copy on ``stream``; one end is pinned. Both must live until it is over."""
        ...

    def record(self, stream: Any) -> Any:
        """An event: all that ``stream`` was given up to now is done."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """``stream`` does what it is given from now on after ``event``. Returns at once."""
        ...

    def block(self, event: Any) -> None:
        """Returns after ``event``."""
        ...


@dataclass(frozen=True, slots=True)
class _ToDevice:
    """Waited for by the stream that computes. ``source`` is held until then."""

    card: Card
    source: Tensor
    target: Tensor
    done: Any

    def wait(self) -> Tensor:
        computing = self.card.computing()
        self.card.wait(computing, self.done)
        self.card.used_on(self.target, computing)
        return self.target


@dataclass(frozen=True, slots=True)
class _ToHost:
    """Waited for by the calling thread. ``source`` is held until then."""

    card: Card
    source: Tensor
    target: Tensor
    done: Any

    def wait(self) -> Tensor:
        self.card.block(self.done)
        return self.target


class Gpu:
    """A ``Device`` made of what a card offers."""

    copies = True

    def __init__(self, card: Card) -> None:
        self.torch_device = card.torch_device
        self.memory_bytes: int | None = card.free_bytes()
        self.words = f"{card.torch_device}, {card.name}"
        self._card = card
        self._up, self._down = card.stream(), card.stream()

    def to_device(self, tensor: Tensor) -> _ToDevice:
        card = self._card
        # From memory that is not pinned the driver copies by itself, and the caller waits for it.
        source = card.pinned(tensor)
        source.copy_(tensor)
        target = card.empty(tensor, self._up)
        card.copy(target, source, self._up)
        return _ToDevice(card, source, target, card.record(self._up))

    def to_host(self, tensor: Tensor) -> _ToHost:
        card = self._card
        source = tensor.detach().contiguous()
        target = card.pinned(source)
        card.wait(self._down, card.record(card.computing()))
        card.used_on(source, self._down)
        card.copy(target, source, self._down)
        return _ToHost(card, source, target, card.record(self._down))

    def read(self, scalars: Sequence[Tensor]) -> list[float]:
        if not scalars:
            return []
        together = torch.stack([scalar.detach().double().reshape(()) for scalar in scalars])
        found: list[float] = self.to_host(together).wait().tolist()
        return found

    def room(self, like: Tensor) -> Tensor:
        return self._card.pinned(like)
