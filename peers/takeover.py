"""How a trainer finds where a run is, and goes on from there: polls all, and reconciles."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import anyio

from peers import messages as msg
from peers.lookout import Lookout, Sight
from peers.reign import MAX_TERM, Superseded
from peers.seed import Seed
from peers.trainer import Trainer
from swarm.core.takeover import Found, Reach, lacking, reach
from swarm.errors import BadInput, TransportError
from swarm.types import Mark, Replica

log = logging.getLogger("swarm.trainer")


async def settle(
    trainer: Trainer,
    lookout: Lookout,
    *,
    fresh: bool,
    patience_s: float,
    seed: Callable[[Mapping[Replica, msg.Held]], Awaitable[Seed]],
    say: Callable[[str], None],
) -> None:
    """Go on from the highest mark that every stage can reach.

    Where there is none for ``patience_s``, go back to what ``seed`` names, given what the poll
    has shown. ``fresh``: where nobody has any weights, the run begins.

    Raises:
        Superseded: a replica obeys a trainer of a higher term.
    """
    trainer.settled = False
    began, said = anyio.current_time(), ""
    while True:
        sight = await lookout.look(detail=True)
        held = await _poll_all(trainer, sight)
        found = [_found(replica, answer) for replica, answer in held.items()]
        reached = reach(found, trainer.stages)
        if reached is not None:
            _adopt(trainer, reached, sight)
            return
        if fresh and all(one.mark is None for one in found):
            trainer.settled = True  # at FRESH, where it is
            trainer.wake()
            return
        left_s = began + patience_s - anyio.current_time()
        if left_s <= 0:
            _go_back(trainer, await seed(held))
            return
        why = "; ".join(lacking(found, trainer.stages))
        if why != said:
            said = why
            say(f"the run cannot go on yet: {why}; it goes back in {left_s:.0f} s")
        await anyio.sleep(min(trainer.manifest.periods.status_s, max(0.0, left_s)))


async def _poll_all(trainer: Trainer, sight: Sight) -> dict[Replica, msg.Held]:
    """Poll every replica that has answered a question; what they hold, frozen."""
    held: dict[Replica, msg.Held] = {}
    terms: list[int] = []
    now = anyio.current_time()
    for replica, stage in sorted(sight.stages.items(), key=lambda item: (item[1], item[0])):
        if 0 <= stage < trainer.stages:
            record = sight.announced.get(replica)
            sequence = 0 if record is None else record.sequence
            trainer.roster.announced(replica, stage, now, sequence)

    async def poll(replica: Replica) -> None:
        message = msg.Poll(
            run=trainer.manifest.run_id, to=replica.boot, stamp=trainer.stamps.take()
        )
        try:
            answer = await trainer.caller.insist(replica.peer, message, tries=2)
        except (TransportError, BadInput) as error:
            log.debug("%s did not answer a poll: %s", replica.peer, error)
            return
        if isinstance(answer, msg.Held) and answer.stage == sight.stages[replica]:
            held[replica] = answer
            trainer.polled.add(replica)
        elif isinstance(answer, msg.Refused) and 0 < (answer.term or 0) <= MAX_TERM:
            terms.append(answer.term or 0)  # a higher one is nobody's honest count of starts

    async with anyio.create_task_group() as tasks:
        for replica in sight.statuses:
            tasks.start_soon(poll, replica)
    if terms:
        raise Superseded(
            f"another trainer leads this run (term {max(terms)}, ours is {trainer.term.number})"
        )
    return held


def _found(replica: Replica, held: msg.Held) -> Found:
    return Found(
        replica=replica,
        stage=held.stage,
        mark=held.mark,
        applied=held.applied,
        held=held.holds,
        losses=dict(held.losses),
        sum=None if held.sum is None else (held.sum.stamp, held.sum.digest),
        decision=None if held.decision is None else held.decision.decision(),
        totals=tuple(held.totals),
    )


def _adopt(trainer: Trainer, reached: Reach, sight: Sight) -> None:
    """Who is there is a member at once, with what it holds; followers are told the decision."""
    trainer.last_decision = reached.decision
    for replica, status in sight.statuses.items():
        trainer.admissions.learnt(sight.stages[replica], status.values)
        if status.detail is not None:
            trainer.addresses[replica.peer] = tuple(status.detail.addresses)
    for one in reached.there:
        trainer.roster.admitted(one.replica, reached.mark)
    trainer.go_on(reached.mark, reached.applied, reached.totals, reached.there)


def _go_back(trainer: Trainer, seed: Seed) -> None:
    """All stages begin again from ``seed``, under a mark of this term."""
    trainer.seed = seed
    trainer.last_decision = None
    trainer.go_on(Mark(trainer.term, seed.copies.t), seed.applied, seed.totals, [])
