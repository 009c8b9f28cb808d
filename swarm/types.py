"""The nouns that every package shares: who, when and which version.

Four names decide what a message is about (boot, term, stamp, mark). All are frozen, hashable
and ordered, so they can be compared, stored in sets and sent as plain msgpack maps.
"""

from __future__ import annotations

from dataclasses import dataclass

PeerId = str
"""A libp2p peer id in base58, e.g. ``12D3KooW...``."""

Boot = str
"""Drawn at random by a process at its start: 16 hex digits. A restart is another boot."""


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """A trainer's reign: compared by number, then by the trainer's boot."""

    number: int
    boot: Boot


@dataclass(frozen=True, slots=True, order=True)
class Stamp:
    """What a trainer numbers everything with that it sends; hops and receipts bear it on."""

    term: Term
    n: int


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """The name of a version of the weights: the term that decided it, and the step count ``t``.

    Equal marks mean equal bits; a step number alone proves nothing.
    """

    term: Term
    t: int


NO_TERM = Term(0, "")
FRESH = Mark(NO_TERM, 0)
"""The mark of a run's initial weights."""


@dataclass(frozen=True, slots=True, order=True)
class Replica:
    """One process that serves a stage. The same peer after a restart is another replica."""

    peer: PeerId
    boot: Boot


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of microbatch ``m``, named by its stamp.

    ``mask`` holds the stages where it still has to count; an empty mask is an evaluation.
    ``ahead``: with delayed updates, it is for the step after that of ``mark``.
    """

    stamp: Stamp
    mark: Mark
    m: int
    mask: frozenset[int]
    ahead: bool = False

    @property
    def evaluation(self) -> bool:
        return not self.mask

    @property
    def lowest(self) -> int:
        """The stage where the backward pass stops. Only for attempts with a mask."""
        return min(self.mask)
