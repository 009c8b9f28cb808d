"""Stands by while another trainer leads, and says when to take over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import anyio

from dht.records import TrainerState
from peers import messages as msg
from peers.lookout import Lookout, Sight
from peers.reign import MAX_TERM
from peers.transport import Frame, refusal
from swarm.core.lease import Watch
from swarm.errors import BadInput
from swarm.manifest import Manifest
from swarm.types import Boot, PeerId


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Nobody leads the run. ``term``: the number for the next reign. ``waited``: all that are
    reached have heard no trainer for the patience."""

    term: int
    reason: str
    waited: bool


@dataclass(frozen=True, slots=True)
class RunOver:
    """The trainer ``peer`` has announced that the run is complete."""

    peer: PeerId


class StandbyInbox:
    """What one answers who leads no run at the moment: only that it stands by."""

    def __init__(self, manifest: Manifest, boot: Boot) -> None:
        self._manifest, self._boot = manifest, boot

    async def handle(self, sender: PeerId, frame: Frame) -> Frame:
        """The transport's handler."""
        del sender
        try:
            message = msg.parse_request(frame.header)
        except BadInput as error:
            return refusal(str(error)[:500])
        if message.run not in ("", self._manifest.run_id):
            return refusal(f"this peer stands by for run {self._manifest.run_id}")
        if not isinstance(message, msg.Question):
            return refusal("this peer leads no run now, it stands by")
        status = msg.Status(boot=self._boot, role="trainer", state="standby")
        payload = [] if message.run else [memoryview(self._manifest.canonical())]
        return Frame(msg.header(status), payload)


async def stand_by(
    manifest: Manifest,
    lookout: Lookout,
    *,
    me: PeerId,
    look: Callable[[Sight], None] = lambda sight: None,
    say: Callable[[str], None],
) -> TakeOver | RunOver:
    """Watch until the run is over, or has nobody to lead it.

    ``look`` is shown every look. A trainer that was this very peer before its restart is dead.
    """
    periods = manifest.periods
    watch = Watch(manifest.stages.count, periods.lease_s, periods.patience_s)
    said = ""
    while True:
        sight = await lookout.look()
        look(sight)
        for record in sight.trainers:
            if record.state is TrainerState.DONE and record.peer != me:
                return RunOver(record.peer)
        quiet = {
            replica: (sight.stages[replica], inf if status.quiet_s is None else status.quiet_s)
            for replica, status in sight.statuses.items()
        }
        verdict = watch.looked(quiet, list(sight.announced), anyio.current_time())
        if verdict.may:
            waited = min((s for _, s in quiet.values()), default=inf) >= periods.patience_s
            return TakeOver(next_term(sight), verdict.reason, waited)
        why = verdict.reason.rsplit(" for ", 1)[0].rsplit(" heard a trainer", 1)[0]
        if why != said:
            said = why
            say(f"standing by: {verdict.reason}")
        await anyio.sleep(periods.status_s)


def next_term(sight: Sight) -> int:
    """One more than the highest number that was heard from replicas."""
    terms = (status.term for status in sight.statuses.values())
    return 1 + max((term for term in terms if term < MAX_TERM), default=0)


def led_by_another(sight: Sight, manifest: Manifest, me: PeerId) -> PeerId | None:
    """The trainer that a replica has heard within the lease, if it is not ``me``."""
    for status in sight.statuses.values():
        heard = status.quiet_s is not None and status.quiet_s <= manifest.periods.lease_s
        if heard and status.trainer in manifest.trainers and status.trainer != me:
            return status.trainer
    return None
