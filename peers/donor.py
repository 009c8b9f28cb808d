"""Gives a stage's state away: to joiners piece by piece, and to whoever keeps checkpoints."""

from __future__ import annotations

import logging
from functools import partial

import anyio
from rich.filesize import decimal
from torch import Tensor

from peers import messages as msg
from peers.host import Host
from peers.lane import Lane
from peers.shelf import Shelf
from peers.sources import PIECE, RUN, Copy, digests
from peers.tensors import RAW, pack
from swarm.core.totals import Totals
from swarm.model.device import snapshot
from swarm.types import Mark, PeerId

log = logging.getLogger("swarm.node")

Reply = tuple[msg.Message, list[memoryview]]

ACTIVE_S = 5.0
"""A joiner that has asked for nothing for so long has given its place to another."""

LONGEST_WAIT_S = 2.0
"""A request that would have to wait longer for its turn is told that it is busy here."""


class Donor:
    """One replica's side of joins: bounded in how many it serves, and how fast.

    ``kept`` is the copy set aside for a checkpoint; ``shelf``, if there is one, holds it on disk.
    """

    def __init__(self, host: Host, lane: Lane) -> None:
        self._host, self._lane = host, lane
        limits = host.manifest.limits
        self._joiners, self._bytes_per_s = limits.joiners, limits.join_bytes_per_s
        self._piece = limits.state_piece
        self._active: dict[PeerId, float] = {}
        self._free_at = 0.0
        self._moved = anyio.Event()
        self._told: tuple[Mark, Tensor] | None = None
        self.kept: Copy | None = None
        self.shelf: Shelf | None = None

    def advanced(self) -> None:
        """The replica is at another mark: whoever waits for the decision gets it."""
        self._moved.set()
        self._moved = anyio.Event()

    async def moved_from(self, mark: Mark) -> None:
        """Wait until the replica is at another mark than this."""
        while self._host.stage.mark == mark:
            await self._moved.wait()

    # -- the state itself -------------------------------------------------------------------

    async def state(self, sender: PeerId, message: msg.GetState) -> Reply:
        """A piece, copied between two passes and labelled with its mark."""
        stage = self._host.stage
        start, stop = message.start, message.start + message.count
        if refused := self._beyond(stop, message.count):
            return refused, []
        vectors = 1 if message.weights_only else len(stage.model.state())
        busy = self._full(sender) or await self._turn(4 * message.count * vectors)
        if busy is not None:
            return busy, []
        kept = self.kept
        if kept is not None and message.mark == kept.mark:
            mark, piece = kept.mark, kept.piece(start, stop)
        else:
            copy = partial(self._copy, message.mark, slice(start, stop))
            found = await self._lane.control("copy", copy)
            if found is None:
                return msg.At(mark=stage.mark), []
            mark, piece = found
        metas, payload = pack([(tensor, RAW) for tensor in piece[:vectors]])
        return msg.Piece(mark=mark, tensors=metas), payload

    def _beyond(self, stop: int, count: int) -> msg.Refused | None:
        length, most = self._host.stage.model.length, max(PIECE, RUN * self._piece)
        if stop > length:
            return msg.Refused(reason=f"the stage has {length} values")
        if count > most:
            return msg.Refused(reason=f"{count} values at once; allowed: {most}")
        return None

    def _copy(self, mark: Mark | None, place: slice) -> tuple[Mark, list[Tensor]] | None:
        stage = self._host.stage
        if stage.mark is None or mark not in (None, stage.mark):
            return None
        vectors = stage.model.state().values()
        return stage.mark, [snapshot(stage.device, vector[place]) for vector in vectors]

    def _full(self, sender: PeerId) -> msg.Busy | None:
        """Whether ``sender`` has to wait for others; trainers, who keep checkpoints, have not."""
        now = anyio.current_time()
        if sender in self._host.manifest.trainers:
            return None
        self._active = {p: at for p, at in self._active.items() if now - at < ACTIVE_S}
        if sender not in self._active and len(self._active) >= self._joiners:
            return msg.Busy(reason=f"{len(self._active)} others are joining from here")
        self._active[sender] = now
        return None

    async def _turn(self, nbytes: int) -> msg.Busy | None:
        """Wait until so many bytes may go out; not for long."""
        now = anyio.current_time()
        start = max(now, self._free_at)
        if start - now > LONGEST_WAIT_S:
            return msg.Busy(reason=f"sends at most {decimal(self._bytes_per_s)}/s to joiners")
        self._free_at = start + nbytes / self._bytes_per_s
        await anyio.sleep_until(start)
        return None

    async def digests(self, message: msg.GetDigests) -> Reply:
        """Of each piece of the state, and what else belongs to that mark."""
        kept = self.kept
        if kept is not None and message.mark == kept.mark:
            vectors = list(kept.vectors.values())
            found = await self._host.executor.side(partial(digests, vectors, self._piece))
            applied, totals = kept.applied, kept.totals
        else:
            live = await self._lane.control("digest", partial(self._live_digests, message.mark))
            if live is None:
                return msg.At(mark=self._host.stage.mark), []
            found, applied, totals = live
        metas, payload = pack([(found, RAW)])
        answer = msg.Digests(
            mark=message.mark,
            applied=applied,
            totals=msg.plain(totals),
            tensors=metas,
        )
        return answer, payload

    def _live_digests(self, mark: Mark) -> tuple[Tensor, int, Totals] | None:
        stage = self._host.stage
        if stage.mark != mark:
            return None
        if self._told is None or self._told[0] != mark:
            self._told = mark, digests(list(stage.model.state().values()), self._piece)
        return self._told[1], stage.applied, stage.totals

    # -- what leads on from there -----------------------------------------------------------

    async def decision(self, message: msg.GetDecision) -> msg.Message:
        """The decision that led on from the mark; if it is our own, wait until there is one."""
        stage = self._host.stage
        with anyio.move_on_after(message.wait_s):
            await self.moved_from(message.mark)
        decided = stage.decided
        if decided is not None and decided.mark == message.mark and decided.to == stage.mark:
            return msg.Decided(decision=msg.WireDecision.of(decided))
        return msg.At(mark=stage.mark)

    async def decided_sum(self, message: msg.GetDecidedSum) -> Reply:
        """A piece of the last sum that was applied here. It need not wait: it is soon of no use."""
        stage = self._host.stage
        stop = message.start + message.count
        if refused := self._beyond(stop, message.count):
            return refused, []
        copy = partial(stage.decided_sum, message.mark, slice(message.start, stop))
        found = await self._lane.control("copy", copy)
        if found is None:
            return msg.At(mark=stage.mark), []
        metas, payload = pack([(found, RAW)])
        return msg.Ok(tensors=metas), payload

    # -- a copy set aside -------------------------------------------------------------------

    async def keep(self, message: msg.Keep) -> msg.Message:
        """Set the state at the mark aside; there is one copy at most."""
        if self.kept is not None and self.kept.mark == message.mark:
            return msg.At(mark=message.mark)
        stage = self._host.stage
        copy = await self._lane.control("copy", partial(self._set_aside, message.mark))
        if copy is None:
            return msg.At(mark=stage.mark)
        if self.shelf is not None:
            self._host.tasks.start_soon(self._shelve, self.shelf, copy)
        return msg.At(mark=copy.mark)

    async def _shelve(self, shelf: Shelf, copy: Copy) -> None:
        try:
            await self._host.executor.side(partial(shelf.put, copy))
        except OSError as error:
            log.warning("the copy of step %d is not on disk: %s", copy.mark.t, error)

    def _set_aside(self, mark: Mark) -> Copy | None:
        stage = self._host.stage
        if stage.mark != mark:
            return None
        self.kept = None  # never two of them in memory
        vectors = {n: snapshot(stage.device, vector) for n, vector in stage.model.state().items()}
        self.kept = Copy(mark, stage.applied, stage.totals, vectors)
        return self.kept
