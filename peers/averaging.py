"""Carries out ``swarm.core.rounds``: parts and sums of a stage's gradient between its replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import anyio
from torch import Tensor

from peers import messages as msg
from peers.host import Host
from peers.lane import Lane
from peers.stage import PIECE, Sealed
from peers.summing import Packed, Summing
from peers.tensors import RAW, Expected, pack, unpack
from swarm.codecs import get_codec
from swarm.core.backoff import Backoff
from swarm.core.hop import Outcome
from swarm.core.partition import vector_into_parts
from swarm.core.rounds import AddUp, Complete, Instruction, Round, SendPart, SendSum
from swarm.errors import BadInput, TransportError
from swarm.types import Replica

T = TypeVar("T")

log = logging.getLogger("swarm.averaging")

RETRY = Backoff(first_s=0.01, cap_s=1.0)
SENDS_AT_ONCE = 8
"""Pieces on their way from here at one time."""

PIECES_PER_MEMBER = 4
"""At least so many, where the vector is long enough, so that sending and adding overlap."""

ALIGN = 16


def cut_pieces(length: int, members: int, most: int = PIECE) -> list[slice]:
    """The fixed pieces of a vector of ``length`` values among so many members.

    None has more than ``most`` values, unless there is one member, who sends nothing.
    """
    if members == 1:
        return [slice(0, length)]
    wanted = -(-length // (members * PIECES_PER_MEMBER))
    size = max(ALIGN, min(most // ALIGN, -(-wanted // ALIGN)) * ALIGN)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def owners_of(pieces: int, members: Sequence[Replica]) -> list[Replica]:
    """Runs of pieces, nearly equal, in the order of the members."""
    runs = vector_into_parts(pieces, len(members), align=1)
    return [member for member, run in zip(members, runs, strict=True) for _ in run]


class Averager:
    """The replica's side of a round: ``prepare`` starts one, the trainer hears a vote."""

    def __init__(self, host: Host, lane: Lane) -> None:
        self._host, self._lane = host, lane
        exact = host.manifest.reproducible.enabled
        self._codec = RAW if exact else host.manifest.wire.averaging
        self._dtype = "int64" if exact else "float32"
        self._lossy = not exact and not get_codec(self._codec).lossless
        self._most = min(PIECE, host.manifest.limits.payload_bytes // (8 if exact else 4))
        self._round: Round | None = None
        self._pieces: list[slice] = []
        self._parts: dict[tuple[int, Replica], Tensor] = {}
        self._encoded: dict[int, Packed] = {}
        self._summing: Summing | None = None
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
        members = message.members
        self._pieces = cut_pieces(self._host.stage.model.length, len(members), self._most)
        owners = owners_of(len(self._pieces), members)
        round_ = Round(message.stamp, self._host.me, members, message.contributors, owners)
        self._round, self._summing = round_, self._make_summing(round_)
        self._carry_out(round_.begin())

    def _make_summing(self, round_: Round) -> Summing:
        """Alone, the accumulators are the sum, unless there is something to be given back."""
        stage = self._host.stage
        alone = len(round_.members) == 1 and stage.residual.kept is None
        gradient = stage.gradient(slice(0, stage.model.length))
        total = stage.total(alone=alone)
        summing = Summing(self._pieces, gradient, total, self._codec, stage.look)
        if self._lossy and not alone:
            summing.residual, summing.lost = stage.residual.kept, stage.residual.begin(gradient)
        return summing

    def end(self) -> None:
        """The round is over here: whatever is under way for it stops at its next look."""
        self._round, self._summing = None, None
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

    async def _aside(self, round_: Round, function: Callable[[Summing], T]) -> T | None:
        """Run ``function`` beside the loop; None if the round is over before or after.

        Where many wait their turn, what the round worked on may be of use to the next by then.
        """

        def run() -> T | None:
            summing = self._summing
            return function(summing) if summing is not None and self._is(round_) else None

        result = await self._host.executor.side(run)
        return result if self._is(round_) else None

    async def _send_part(self, round_: Round, piece: int, to: Replica) -> None:
        async with self._sends:
            packed = await self._part(round_, piece)
            if packed is not None:
                await self._send_piece(round_, msg.Part, piece, to, packed)

    async def _part(self, round_: Round, piece: int) -> Packed | None:
        if self._lossy:
            return await self._aside(round_, lambda summing: summing.part(piece))
        summing = self._summing
        return summing.part(piece) if summing is not None and self._is(round_) else None

    async def _add_up(self, round_: Round, piece: int, order: Sequence[Replica]) -> None:
        if not self._is(round_):
            return
        if len(round_.members) == 1:
            await self._sum_alone(round_, piece)
            return
        me = self._host.me
        parts = [None if r == me else self._parts.pop((piece, r)) for r in order]
        encoded = await self._aside(round_, lambda summing: summing.add(piece, parts))
        if encoded is not None:
            self._encoded[piece] = encoded
            self._carry_out(round_.added(piece))

    async def _sum_alone(self, round_: Round, piece: int) -> None:
        """The accumulators are the sum; what was lost before is given back."""
        summing = self._summing
        if summing is not None and summing.lost is not None:
            if not await self._aside(round_, Summing.give_back):
                return
            self._host.stage.residual.settle()
        if self._is(round_):
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
        packed: Packed,
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
        if self._lossy and self._host.me not in round_.contributors:
            await self._aside(round_, partial(Summing.send_nothing, pieces=round_.pieces_of_others))
        summing = self._summing
        if summing is None or not self._is(round_):
            return
        looks = None
        if len(round_.members) > 1:
            if not await self._aside(round_, Summing.look_at_all):
                return
            looks = [summing.looks[piece] for piece in range(len(self._pieces))]
        seal = partial(self._host.stage.seal, round_.stamp, looks)
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
        decode = partial(self._unpack, self._expected(message.piece, self._codec), message, payload)
        tensor = await self._host.executor.side(decode) if self._lossy else decode()
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
        await self._take_sum(round_, message.piece, self._codec, message, payload)
        return msg.Ok()

    async def _take_sum(
        self,
        round_: Round,
        piece: int,
        codec: str,
        message: msg.Sum | msg.Ok,
        payload: Sequence[memoryview],
    ) -> None:
        """Raises BadMessage: it is not what is expected."""
        decode = partial(self._unpack, self._expected(piece, codec), message, payload)

        def put(summing: Summing) -> bool:
            summing.put(piece, decode())
            return True

        if await self._aside(round_, put) and round_.wants_sum(piece):
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

    def _expected(self, piece: int, codec: str) -> Expected:
        where = self._pieces[piece]
        return Expected((where.stop - where.start,), self._dtype, codec)

    @staticmethod
    def _unpack(
        expected: Expected, message: msg.Part | msg.Sum | msg.Ok, payload: Sequence[memoryview]
    ) -> Tensor:
        (tensor,) = unpack(message.tensors, payload, [expected])
        return tensor

    # -- what is lacking is fetched ---------------------------------------------------------

    async def get_sum(self, message: msg.GetSum) -> tuple[msg.Message, list[memoryview]]:
        """A piece of the finished sum, exactly as it is held, for a mate that lacks it."""
        sealed, summing = self._host.stage.sealed, self._summing
        if sealed is None or sealed.round != message.round or summing is None:
            return msg.Refused(reason="that round's sum is not held here"), []
        if message.piece >= len(self._pieces):
            return msg.Refused(reason=f"there are {len(self._pieces)} pieces"), []
        metas, payload = pack([(summing.sum_of(message.piece), RAW)])
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
                await self._take_sum(round_, piece, RAW, answer.message, answer.payload)
            except (TransportError, BadInput) as error:
                log.info("fetching a sum from %s failed: %s", source.peer[-6:], error)
                return
