"""Carries out ``swarm.core.rounds``: parts and sums of a stage's gradient between its replicas."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import anyio
from torch import Tensor

from peers import messages as msg
from peers.host import Host
from peers.lane import Lane
from peers.stage import PIECE, Sealed
from peers.tensors import RAW, Expected, pack, unpack
from swarm.codecs import get_codec
from swarm.core.backoff import Backoff
from swarm.core.hop import Outcome
from swarm.core.partition import vector_into_parts
from swarm.core.rounds import AddUp, Complete, Instruction, Round, SendPart, SendSum
from swarm.errors import BadInput, TransportError
from swarm.types import Replica

log = logging.getLogger("swarm.averaging")

RETRY = Backoff(first_s=0.01, cap_s=1.0)
SENDS_AT_ONCE = 8
"""Pieces on their way from here at one time."""

PIECES_PER_MEMBER = 4
"""At least so many, where the vector is long enough, so that sending and adding overlap."""

ALIGN = 16


def cut_pieces(length: int, members: int) -> list[slice]:
    """The fixed pieces of a vector of ``length`` values among so many members."""
    if members == 1:
        return [slice(0, length)]
    wanted = -(-length // (members * PIECES_PER_MEMBER))
    size = max(ALIGN, min(PIECE, -(-wanted // ALIGN) * ALIGN))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def owners_of(pieces: int, members: Sequence[Replica]) -> list[Replica]:
    """Runs of pieces, nearly equal, in the order of the members."""
    runs = vector_into_parts(pieces, len(members), align=1)
    return [member for member, run in zip(members, runs, strict=True) for _ in run]


class Averager:
    """The replica's side of a round: ``prepare`` starts one, the trainer hears a vote."""

    def __init__(self, host: Host, lane: Lane) -> None:
        self._host, self._lane = host, lane
        wire = host.manifest.wire.averaging
        self._exact = host.manifest.reproducible.enabled
        self._codec = RAW if self._exact else wire
        self._dtype = "int64" if self._exact else "float32"
        self._round: Round | None = None
        self._pieces: list[slice] = []
        self._parts: dict[tuple[int, Replica], Tensor] = {}
        self._encoded: dict[int, tuple[list[msg.TensorMeta], list[memoryview]]] = {}
        self._total: Tensor | None = None
        self._sends = anyio.CapacityLimiter(SENDS_AT_ONCE)
        self._missed: set[Replica] = set()

    # -- the trainer asks -------------------------------------------------------------------

    async def prepare(self, message: msg.Prepare) -> msg.Message:
        """Take part in the round, or say what is held. Asked again, say how far it is."""
        stage = self._host.stage
        if stage.mark != message.mark:
            return msg.At(mark=stage.mark)
        if self._host.me not in message.members:
            return msg.Refused(reason="this replica is not among the members")
        if not set(message.contributors) <= set(message.members):
            return msg.Refused(reason="contributors are not all members")
        if self._round is not None and message.stamp < self._round.stamp:
            return msg.Refused(reason="a later round is known")
        if self._round is None or self._round.stamp != message.stamp:
            prepare = partial(stage.prepare, message.stamp, message.expected)
            takes_part = await self._lane.control("prepare", prepare)
            if not takes_part:
                self.end()
                return msg.Prepared(takes_part=False, holds=frozenset(stage.ledger.held))
            self._begin(message)
        return self._progress()

    def _progress(self) -> msg.Prepared:
        round_, sealed = self._round, self._host.stage.sealed
        if round_ is None or self._host.stage.round != round_.stamp:
            held = frozenset(self._host.stage.ledger.held)
            return msg.Prepared(takes_part=False, holds=held)
        if sealed is not None and sealed.round == round_.stamp:
            return msg.Prepared(
                takes_part=True,
                digest=sealed.digest,
                squared_norm=sealed.squared_norm,
                finite=sealed.finite,
            )
        return msg.Prepared(takes_part=True, missed=round_.missing_members())

    def _begin(self, message: msg.Prepare) -> None:
        if self._round is not None and self._round.stamp >= message.stamp:
            return  # a repeat of the same prepare was quicker, or a newer one has begun
        self.end()
        stage = self._host.stage
        self._pieces = cut_pieces(stage.model.length, len(message.members))
        owners = owners_of(len(self._pieces), message.members)
        self._round = Round(
            message.stamp, self._host.me, message.members, message.contributors, owners
        )
        self._total = stage.total(alone=len(message.members) == 1)
        self._carry_out(self._round.begin())

    def end(self) -> None:
        """The round is over here: whatever is under way for it stops at its next look."""
        self._round, self._total = None, None
        self._parts.clear()
        self._encoded.clear()
        self._missed.clear()

    @property
    def _alive(self) -> bool:
        """Counting anything new ends the round for this replica."""
        return self._round is not None and self._host.stage.round == self._round.stamp

    # -- what the machine says --------------------------------------------------------------

    def _carry_out(self, todo: Sequence[Instruction]) -> None:
        if self._round is not None:
            for work in todo:
                self._host.tasks.start_soon(self._do, work, self._round)

    async def _do(self, work: Instruction, round_: Round) -> None:
        match work:
            case SendPart(piece=piece, to=to):
                await self._send_part(round_, piece, to)
            case AddUp(piece=piece, order=order):
                await self._add_up(round_, piece, order)
            case SendSum(piece=piece, to=to_all):
                for to in to_all:
                    self._host.tasks.start_soon(self._send_sum, round_, piece, to)
            case Complete():
                await self._vote(round_)

    async def _send_part(self, round_: Round, piece: int, to: Replica) -> None:
        async with self._sends:
            if not self._is(round_):
                return
            tensors = [(self._host.stage.gradient(self._pieces[piece]), self._codec)]
            packed = await self._pack(tensors)
            await self._send_piece(round_, msg.Part, piece, to, packed)

    async def _add_up(self, round_: Round, piece: int, order: Sequence[Replica]) -> None:
        if not self._is(round_) or self._total is None:
            return
        if len(round_.members) == 1:
            self._carry_out(round_.added(piece))  # the accumulators are the sum
            return
        where = self._pieces[piece]
        total, own = self._total[where], self._host.stage.gradient(where)
        me = self._host.me
        parts = [own if r == me else self._parts.pop((piece, r)) for r in order]

        def add() -> tuple[list[msg.TensorMeta], list[memoryview]] | None:
            # Where many wait their turn the round may be over, and ``total`` of use to the next.
            return _add(total, parts, self._codec) if self._is(round_) else None

        encoded = await self._host.executor.side(add)
        if encoded is None or not self._is(round_):
            return
        self._encoded[piece] = encoded
        self._carry_out(round_.added(piece))

    async def _send_sum(self, round_: Round, piece: int, to: Replica) -> None:
        async with self._sends:
            if not self._is(round_):
                return
            await self._send_piece(round_, msg.Sum, piece, to, self._encoded[piece])

    async def _send_piece(
        self,
        round_: Round,
        kind: type[msg.Part] | type[msg.Sum],
        piece: int,
        to: Replica,
        packed: tuple[list[msg.TensorMeta], list[memoryview]],
    ) -> None:
        metas, payload = packed
        message = kind(
            run=self._host.manifest.run_id,
            to=to.boot,
            round=round_.stamp,
            piece=piece,
            sender=self._host.me,
            tensors=metas,
        )
        await self._deliver(round_, to, message, payload)

    async def _deliver(
        self, round_: Round, to: Replica, message: msg.Message, payload: list[memoryview]
    ) -> None:
        """Until it is taken, refused, or the round is over; trouble is told to the trainer."""
        failures = 0
        while self._is(round_):
            outcome, reason = await self._host.caller.push(to.peer, message, payload)
            if outcome in (Outcome.ACCEPTED, Outcome.REFUSED):
                return
            failures += 1
            if outcome is not Outcome.BUSY and failures == 1:
                level = logging.DEBUG if to in self._missed else logging.INFO
                log.log(level, "cannot reach %s in a round: %s", to.peer[-6:], reason)
                self._missed.add(to)
                await self._host.tell_trainer(
                    msg.Trouble(
                        run=self._host.manifest.run_id,
                        round=round_.stamp,
                        stage=self._host.stage.stage,
                        boot=self._host.me.boot,
                        missed=[to],
                    )
                )
            await anyio.sleep(RETRY.pause(failures, self._host.rng))

    async def _vote(self, round_: Round) -> None:
        seal = partial(self._host.stage.seal, round_.stamp)
        sealed: Sealed | None = await self._lane.control("seal", seal)
        if sealed is None or not self._is(round_):
            return
        await self._host.tell_trainer(
            msg.Vote(
                run=self._host.manifest.run_id,
                round=round_.stamp,
                stage=self._host.stage.stage,
                boot=self._host.me.boot,
                digest=sealed.digest,
                squared_norm=sealed.squared_norm,
                finite=sealed.finite,
            )
        )

    async def _pack(
        self, tensors: list[tuple[Tensor, str]]
    ) -> tuple[list[msg.TensorMeta], list[memoryview]]:
        if self._codec == RAW or get_codec(self._codec).lossless:
            return pack(tensors)
        return await self._host.executor.side(partial(pack, tensors))

    def _is(self, round_: Round) -> bool:
        return self._round is round_ and self._alive

    # -- mates call -------------------------------------------------------------------------

    async def part(self, message: msg.Part, payload: list[memoryview]) -> msg.Message:
        answer = self._belongs(message)
        if answer is not None:
            return answer
        round_ = self._round
        assert round_ is not None
        if not round_.wants_part(message.piece, message.sender):
            return self._unwanted(round_, message)
        (tensor,) = await self._unpack(message, payload, self._codec)
        if self._is(round_) and round_.wants_part(message.piece, message.sender):
            self._parts[message.piece, message.sender] = tensor
            self._carry_out(round_.part(message.piece, message.sender))
        return msg.Ok()

    async def sum(self, message: msg.Sum, payload: list[memoryview]) -> msg.Message:
        answer = self._belongs(message)
        if answer is not None:
            return answer
        round_ = self._round
        assert round_ is not None
        if not round_.wants_sum(message.piece):
            return self._unwanted(round_, message)
        if round_.owners[message.piece] != message.sender:
            return msg.Refused(reason=f"piece {message.piece} is not summed by the sender")
        (tensor,) = await self._unpack(message, payload, self._codec)
        self._take_sum(round_, message.piece, tensor)
        return msg.Ok()

    def _take_sum(self, round_: Round, piece: int, tensor: Tensor) -> None:
        if self._is(round_) and self._total is not None and round_.wants_sum(piece):
            self._total[self._pieces[piece]].copy_(tensor)
            self._carry_out(round_.sum_piece(piece))

    def _belongs(self, message: msg.Part | msg.Sum) -> msg.Message | None:
        """None if the message is of the round that is alive here."""
        round_ = self._round
        bar = self._host.stage.ledger.bar
        if round_ is not None and message.round == round_.stamp:
            if not self._alive:
                return msg.Refused(reason="that round has ended here")
            return None
        if bar is None or message.round >= bar:
            # Its prepare is on its way, or has just been obeyed and the round is being set up.
            return msg.Busy(reason="not yet in that round")
        return msg.Refused(reason="that round is dead")

    def _unwanted(self, round_: Round, message: msg.Part | msg.Sum) -> msg.Message:
        if message.sender in round_.members and message.piece < len(self._pieces):
            return msg.Ok()  # a repeat: it is here already
        return msg.Refused(reason=f"piece {message.piece} of {message.sender.peer} is not wanted")

    async def _unpack(
        self, message: msg.Part | msg.Sum, payload: list[memoryview], codec: str
    ) -> list[Tensor]:
        where = self._pieces[message.piece]
        expected = [Expected((where.stop - where.start,), self._dtype, codec)]
        unpacked = partial(unpack, message.tensors, payload, expected)
        if codec == RAW or get_codec(codec).lossless:
            return unpacked()
        return await self._host.executor.side(unpacked)

    # -- what is lacking is fetched ---------------------------------------------------------

    async def get_sum(self, message: msg.GetSum) -> tuple[msg.Message, list[memoryview]]:
        """A piece of the finished sum, exactly as it is held, for a mate that lacks it."""
        sealed = self._host.stage.sealed
        if sealed is None or sealed.round != message.round or self._total is None:
            return msg.Refused(reason="that round's sum is not held here"), []
        if message.piece >= len(self._pieces):
            return msg.Refused(reason=f"there are {len(self._pieces)} pieces"), []
        metas, payload = pack([(self._total[self._pieces[message.piece]], RAW)])
        return msg.Ok(tensors=metas), payload

    async def fetch(self, message: msg.Fetch) -> msg.Message:
        """The trainer says that ``source`` has voted: copy from it what is missing."""
        round_ = self._round
        if round_ is None or round_.stamp != message.round or not self._alive:
            return msg.Refused(reason="that round is not alive here")
        self._host.tasks.start_soon(self._fetch, round_, message.source)
        return msg.Ok()

    async def _fetch(self, round_: Round, source: Replica) -> None:
        for piece in round_.missing_pieces():
            if not self._is(round_):
                return
            where = self._pieces[piece]
            question = msg.GetSum(
                run=self._host.manifest.run_id,
                to=source.boot,
                round=round_.stamp,
                piece=piece,
                sender=self._host.me,
            )
            try:
                answer = await self._host.caller.call(source.peer, question)
                if not isinstance(answer.message, msg.Ok):
                    raise BadInput(f"answered {answer.message.kind}")
                expected = [Expected((where.stop - where.start,), self._dtype, RAW)]
                (tensor,) = unpack(answer.message.tensors, answer.payload, expected)
            except (TransportError, BadInput) as error:
                log.info("fetching a sum from %s failed: %s", source.peer[-6:], error)
                return
            self._take_sum(round_, piece, tensor)


def _add(
    total: Tensor, parts: Sequence[Tensor], codec: str
) -> tuple[list[msg.TensorMeta], list[memoryview]]:
    """Add the parts in order into ``total``; returns the sum as it is sent.

    With a lossy codec ``total`` becomes what the others will decode, so that all hold equal bits.
    """
    if total.data_ptr() != parts[0].data_ptr():
        total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    metas, payload = pack([(total, codec)])
    if codec != RAW and not get_codec(codec).lossless:
        (decoded,) = unpack(
            metas,
            [_joined(payload)],
            [Expected(tuple(total.shape), "float32", codec)],
        )
        total.copy_(decoded)
    return metas, payload


def _joined(payload: list[memoryview]) -> memoryview:
    return memoryview(bytearray(b"".join(payload)))
