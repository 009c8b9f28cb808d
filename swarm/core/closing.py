"""The end of a step in one stage, as the trainer drives it: prepare, sum, vote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarm.types import Replica, Stamp

FETCHES = 3
"""How often a member is told to fetch what it lacks, from one voter after the other."""

IDLE_PROBES = 3
"""So often all may say that they miss nobody, though nobody has voted; then a new round begins."""


class Phase(StrEnum):
    OPEN = "open"
    SUMMING = "summing"
    PROBING = "probing"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Prepare:
    """Ask ``replica`` to take part in the round named by ``round``, or how far it is.

    It answers that it takes part and whom it misses, or with its vote if it has the sum (so a
    vote that was lost comes again), or with what it holds if that differs from ``expected``.
    ``members`` in the order in which parts are added; ``contributors`` are those that hold
    anything; ``expected`` is what this replica should hold.
    """

    stage: int
    round: Stamp
    replica: Replica
    members: tuple[Replica, ...]
    contributors: tuple[Replica, ...]
    expected: frozenset[int]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Tell ``replica`` to copy what it lacks of the sum from ``source``, which has voted."""

    stage: int
    round: Stamp
    replica: Replica
    source: Replica


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove ``replica`` from the stage's members."""

    replica: Replica
    reason: str


@dataclass(frozen=True, slots=True)
class Vote:
    """A member holds the whole sum of the round: its digest, squared norm, and whether finite."""

    round: Stamp
    digest: str
    squared_norm: float
    finite: bool


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What a replica holds differs from what was expected: the step reconciles."""

    replica: Replica
    holds: frozenset[int]


Instruction = Prepare | Fetch | Drop


class Closing:
    """Machine for one stage: ``prepare`` opens a round, votes make it READY.

    Args:
        stage: which. limit_s: how long a round may take without an end before all are asked how
        far they are; doubled with each new round. answer_s: how long an answer may take.

    ``latest`` names the last round that was opened, alive or dead. ``irreplaceable``: a member
    whose work is in the sum is gone, so the round must stand.
    """

    def __init__(self, stage: int, *, limit_s: float, answer_s: float) -> None:
        self.stage = stage
        self.phase = Phase.OPEN
        self.round: Stamp | None = None
        self.latest: Stamp | None = None
        self.members: tuple[Replica, ...] = ()
        self.votes: dict[Replica, Vote] = {}
        self.deadline = float("inf")
        self.rounds = 0
        self.irreplaceable = False
        self._limit_s, self._answer_s = limit_s, answer_s
        self._contributors: tuple[Replica, ...] = ()
        self._expected: dict[Replica, frozenset[int]] = {}
        self._missed: dict[Replica, tuple[Replica, ...]] = {}
        self._present: set[Replica] = set()
        self._silent: set[Replica] = set()
        self._fetches: dict[Replica, int] = {}
        self._suspect: Replica | None = None
        self._idle = 0
        self._disagreed = False
        self._odd: tuple[Replica, ...] = ()

    def prepare(
        self, stamp: Stamp, expected: Mapping[Replica, frozenset[int]], now: float
    ) -> list[Instruction]:
        """Open a round among the keys of ``expected`` (in that order of adding)."""
        self.phase, self.round, self.latest = Phase.SUMMING, stamp, stamp
        self.irreplaceable = False
        self.members, self._present = tuple(expected), set(expected)
        self._expected = dict(expected)
        self._contributors = tuple(member for member in self.members if expected[member])
        self.votes, self._missed, self._fetches = {}, {}, {}
        self._suspect, self._idle = None, 0
        self.deadline = now + self._limit_s * 2.0 ** min(self.rounds, 6)
        self.rounds += 1
        return [self._ask(member) for member in self.members]

    def _ask(self, member: Replica) -> Prepare:
        assert self.round is not None
        return Prepare(
            self.stage,
            self.round,
            member,
            self.members,
            self._contributors,
            self._expected[member],
        )

    def vote(self, replica: Replica, vote: Vote) -> None:
        """``replica`` holds the whole sum. Votes of other rounds and strangers are ignored."""
        if vote.round != self.round or replica not in self._present:
            return
        self.votes[replica] = vote
        self._silent.discard(replica)
        self._if_ready()

    def agreed(
        self, replica: Replica, round_: Stamp, missed: Sequence[Replica], now: float
    ) -> list[Instruction]:
        """``replica`` takes part; while asked again, it says from whom pieces are missing."""
        if round_ != self.round or self.phase is not Phase.PROBING or replica not in self._present:
            return []
        self._silent.discard(replica)
        self._missed[replica] = tuple(missed)
        return self._judge(now) if not self._silent else []

    def hurry(self, round_: Stamp, now: float) -> list[Instruction]:
        """A member has trouble with another: ask all how far they are, now."""
        if round_ != self.round or self.phase is not Phase.SUMMING:
            return []
        return self._probe(now)

    def tick(self, now: float) -> list[Instruction]:
        if self._odd:
            odd, self._odd = self._odd, ()
            return [Drop(member, "its sum differs from the others' twice") for member in odd]
        if now < self.deadline:
            return []
        if self.phase is Phase.SUMMING:
            return self._probe(now)
        return self._judge(now)

    def _probe(self, now: float) -> list[Instruction]:
        self.phase = Phase.PROBING
        self.deadline = now + self._answer_s
        self._missed = {}
        self._silent = {member for member in self.members if member not in self.votes}
        return [self._ask(member) for member in self.members if member in self._silent]

    def _judge(self, now: float) -> list[Instruction]:
        """All that answer have answered: the silent go, else laggards fetch, else one goes."""
        silent = [member for member in self.members if member in self._silent]
        lacking = [m for m in self.members if m not in self.votes and m not in self._silent]
        self.phase = Phase.SUMMING
        self.deadline = now + self._limit_s * 2.0 ** min(self.rounds, 6)
        if silent:
            return [Drop(member, "silent in a round of averaging") for member in silent]
        return [self._fetch(member) for member in lacking] if self.votes else self._blame()

    def _fetch(self, member: Replica) -> Fetch | Drop:
        """From each voter in turn, since a member may be unable to reach one of them."""
        assert self.round is not None
        tries = self._fetches.get(member, 0)
        self._fetches[member] = tries + 1
        if tries >= max(FETCHES, len(self.votes)):
            return Drop(member, "cannot get the sum of its mates")
        sources = sorted(self.votes)
        return Fetch(self.stage, self.round, member, sources[tries % len(sources)])

    def _blame(self) -> list[Instruction]:
        """Nobody has the sum. The most missed goes, but only if it was so at the last look too.

        The first look may have brought it a prepare that was lost.
        """
        suspect, self._suspect = self._suspect, self._most_missed()
        if self._suspect is None:
            self._idle += 1
            if self._idle >= IDLE_PROBES:
                self.reopen()
        elif self._suspect == suspect:
            return [Drop(suspect, "its mates cannot reach it")]
        return []

    def _most_missed(self) -> Replica | None:
        counts = {
            member: sum(member in missed for who, missed in self._missed.items() if who != member)
            for member in self.members
        }
        most = max(counts.values())
        if most == 0:
            return None
        return min(
            (member for member in self.members if counts[member] == most),
            key=lambda member: (len(self._expected[member]), member),
        )

    def removed(self, replica: Replica) -> bool:
        """``replica`` is gone. True if the round stands all the same: somebody holds its sum.

        So it is for one that was removed before, came back empty, and is gone again.
        """
        if replica not in self._present:
            return self.round is not None and replica in self._expected
        stands = bool(self.votes)
        self.members = tuple(member for member in self.members if member != replica)
        self._present.discard(replica)
        self.votes.pop(replica, None)
        self._silent.discard(replica)
        if stands and self.votes:
            self.irreplaceable |= bool(self._expected[replica])
            if self.phase is Phase.SUMMING:
                self.deadline = float("-inf")  # what it owed the others will not come
            self._if_ready()
        else:
            self.reopen()
            stands = False
        return stands

    def reopen(self) -> None:
        """The round is dead. The next needs every microbatch to be held by somebody again."""
        self.irreplaceable = False
        self.phase, self.round = Phase.OPEN, None
        self.deadline = float("inf")
        self.votes, self.members, self._present, self._silent = {}, (), set(), set()

    def _if_ready(self) -> None:
        if len(self.votes) < len(self.members):
            return  # only members vote
        if len({vote.digest for vote in self.votes.values()}) == 1:
            self.phase, self.deadline = Phase.READY, float("inf")
            return
        if self._disagreed:
            self._odd = self._minority()
        self._disagreed = True
        self.reopen()

    def _minority(self) -> tuple[Replica, ...]:
        """Whose sum is not that of most; where as many differ, of those who hold most."""
        most: Counter[str] = Counter()
        work: Counter[str] = Counter()
        for member, vote in self.votes.items():
            most[vote.digest] += 1
            work[vote.digest] += len(self._expected[member])
        right = max(most, key=lambda digest: (most[digest], work[digest], digest))
        return tuple(member for member in self.members if self.votes[member].digest != right)

    @property
    def outcome(self) -> Vote:
        """The vote that stands for all, once READY."""
        return self.votes[self.members[0]]
