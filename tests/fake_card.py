"""A GPU that is none: tensors stay on the CPU, but copies come late, and misuse is an error.

A copy happens when its event is waited for, not before: until then its target holds nonsense, and
whatever is done to its source in the meantime is copied too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from peers.executor import InlineExecutor

T = TypeVar("T")

LOOP = "the event loop"


@dataclass(eq=False)
class Stream:
    work: list[Callable[[], None]] = field(default_factory=list)
    given: int = 0
    done: int = 0
    after_computing: bool = False

    def add(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        self.given += 1

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work.pop(0)()


@dataclass(frozen=True)
class Event:
    stream: Stream
    place: int


class FakeCard:
    """See ``swarm.model.gpu.Card``. ``where``: what runs now, as the executor names it.

    ``blocked`` counts, by that name, how often a thread stood still; ``up`` and ``down`` copies.
    """

    torch_device = torch.device("cpu")
    name = "a card for tests"

    def __init__(self) -> None:
        self.where = "test"
        self.blocked: Counter[str] = Counter()
        self.up = self.down = 0
        self._computing = Stream()
        self._pinned: dict[int, Tensor] = {}
        self._used: set[tuple[int, int]] = set()

    def free_bytes(self) -> int:
        return 3 << 30

    def stream(self) -> Stream:
        return Stream()

    def computing(self) -> Stream:
        assert self.where not in (LOOP, "side"), f"{self.where} is not where is computed"
        return self._computing

    def pinned(self, like: Tensor) -> Tensor:
        made = _nonsense(like)
        self._pinned[made.data_ptr()] = made  # held, so that no other gets its address
        return made

    def empty(self, like: Tensor, stream: Stream) -> Tensor:
        assert stream is not self._computing
        return _nonsense(like)

    def used_on(self, tensor: Tensor, stream: Stream) -> None:
        self._used.add((tensor.data_ptr(), id(stream)))

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        assert self.where != LOOP, "filling pinned memory takes the event loop's time"
        assert stream is not self._computing, "a copy that computing waits for"
        down = target.data_ptr() in self._pinned
        assert down != (source.data_ptr() in self._pinned), "one end is pinned memory of the host"
        if down:
            assert stream.after_computing, "copied before it is computed"
            assert (source.data_ptr(), id(stream)) in self._used, "may be freed while it is copied"
            stream.after_computing = False
        self.down += down
        self.up += not down
        stream.add(lambda: _copy(target, source))

    def record(self, stream: Stream) -> Event:
        return Event(stream, stream.given)

    def wait(self, stream: Stream, event: Event) -> None:
        if stream is self._computing:
            event.stream.run(event.place)  # computing goes on after it
        else:
            assert event.stream is self._computing
            stream.after_computing = True

    def block(self, event: Event) -> None:
        assert self.where != LOOP, "the event loop stands still"
        self.blocked[self.where] += 1
        event.stream.run(event.place)


def placed(card: FakeCard) -> type[InlineExecutor]:
    """An inline executor that tells ``card`` what runs; all else is the event loop."""
    card.where = LOOP

    def told(where: str, function: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            card.where = where
            try:
                return function()
            finally:
                card.where = LOOP

        return run

    class Placed(InlineExecutor):
        async def lane(self, work: str, function: Callable[[], T]) -> T:
            return await super().lane(work, told(work, function))

        async def side(self, function: Callable[[], T]) -> T:
            return await super().side(told("side", function))

    return Placed


def _nonsense(like: Tensor) -> Tensor:
    value = float("nan") if like.is_floating_point() else torch.iinfo(like.dtype).max
    return torch.full(like.shape, value, dtype=like.dtype)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
