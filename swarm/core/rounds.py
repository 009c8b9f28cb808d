"""One round of averaging, as a replica sees it: who sums which piece of the gradient with whom.

The vector is cut into fixed pieces; each member owns a run of them. A member sends every piece to
its owner, the owner adds the members' pieces in the order of the members and sends the sum to
all. So a round has *one* sum, bit for bit, however many take part and whoever is slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.types import Replica, Stamp


@dataclass(frozen=True, slots=True)
class SendPart:
    """Send our own gradient's piece to its owner."""

    piece: int
    to: Replica


@dataclass(frozen=True, slots=True)
class AddUp:
    """All parts of this piece of ours are here: add them, in this order."""

    piece: int
    order: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class SendSum:
    """Send the sum of a piece of ours to every other member."""

    piece: int
    to: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """The whole sum is here: digest it and vote."""


Instruction = SendPart | AddUp | SendSum | Complete


class Round:
    """Machine for one round: ``begin``, then ``part``, ``added`` and ``sum_piece`` as they come.

    Args:
        stamp: the prepare's stamp, which names the round.
        me: this replica, one of ``members``.
        members: all that take part, in the order in which parts are added.
        contributors: those of them that hold anything; the others send nothing.
        owners: the owner of each piece.
    """

    def __init__(
        self,
        stamp: Stamp,
        me: Replica,
        members: Sequence[Replica],
        contributors: Sequence[Replica],
        owners: Sequence[Replica],
    ) -> None:
        self.stamp = stamp
        self.members = tuple(members)
        self._me = me
        self._others = tuple(member for member in members if member != me)
        self.contributors = self._order = tuple(
            member for member in members if member in set(contributors)
        )
        self.owners = tuple(owners)
        self._parts: dict[int, set[Replica]] = {
            piece: set() for piece, owner in enumerate(owners) if owner == me
        }
        self._summed: set[int] = set()
        self._have: set[int] = set()
        self._complete = False

    def begin(self) -> list[Instruction]:
        """Our own share of the work that needs nobody else."""
        todo: list[Instruction] = []
        if self._me in self._order:
            todo += [SendPart(piece, self.owners[piece]) for piece in self.pieces_of_others]
        for piece in self._parts:
            if self._me in self._order:
                self._parts[piece].add(self._me)
            todo += self._if_all(piece)
        return todo + self._if_complete()

    @property
    def pieces_of_others(self) -> list[int]:
        """In the order in which we send our parts: one of each owner, then the next of each.

        The owners take turns from our neighbour on: so no owner gets everything at first and
        nothing later, and sums are ready early.
        """
        place = {member: index for index, member in enumerate(self.members)}
        mine, before = place[self._me], Counter[Replica]()
        turns = []
        for piece, owner in enumerate(self.owners):
            if owner != self._me:
                turns.append((before[owner], (place[owner] - mine) % len(place), piece))
                before[owner] += 1
        return [piece for _, _, piece in sorted(turns)]

    def wants_part(self, piece: int, sender: Replica) -> bool:
        """Whether a part of ``piece`` from ``sender`` belongs here and is not here yet."""
        return piece in self._parts and sender in self._order and sender not in self._parts[piece]

    def part(self, piece: int, sender: Replica) -> list[Instruction]:
        """``sender``'s part of ``piece`` is here (``wants_part`` said yes)."""
        self._parts[piece].add(sender)
        return self._if_all(piece)

    def added(self, piece: int) -> list[Instruction]:
        """The sum of our own ``piece`` stands."""
        self._have.add(piece)
        send: list[Instruction] = [SendSum(piece, self._others)] if self._others else []
        return send + self._if_complete()

    def wants_sum(self, piece: int) -> bool:
        """Whether the sum of ``piece`` is still missing and comes from somebody else."""
        known = 0 <= piece < len(self.owners)
        return known and piece not in self._have and piece not in self._parts

    def sum_piece(self, piece: int) -> list[Instruction]:
        """The sum of ``piece`` is here, from its owner or fetched from one that has voted."""
        self._have.add(piece)
        return self._if_complete()

    def missing_pieces(self) -> list[int]:
        return [piece for piece in range(len(self.owners)) if piece not in self._have]

    def missing_members(self) -> list[Replica]:
        """Whom we wait for: owners whose sums, and contributors whose parts, have not come."""
        missed = {self.owners[piece] for piece in self.missing_pieces()} - {self._me}
        for piece, parts in self._parts.items():
            if piece not in self._have:
                missed |= set(self._order) - parts
        return [member for member in self.members if member in missed]

    def _if_all(self, piece: int) -> list[Instruction]:
        if piece in self._summed or self._parts[piece] != set(self._order):
            return []
        self._summed.add(piece)
        return [AddUp(piece, self._order)]

    def _if_complete(self) -> list[Instruction]:
        if self._complete or len(self._have) < len(self.owners):
            return []
        self._complete = True
        return [Complete()]
