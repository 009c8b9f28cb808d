"""``swarm status``: enter a swarm, look around once, and say what is there.

It takes no part: its key is made for the occasion unless one is given, it announces nothing and
asks questions that bear no term. It reads the swarm, so any peer's address will do, and it needs
no coordinator.
"""

from __future__ import annotations

from peers.entering import Entry, entered
from peers.finding import learn_run
from peers.lookout import Lookout
from peers.report import Report
from peers.reporting import make_report
from peers.rpc import Caller
from peers.wire import Limits
from swarm.manifest import CANONICAL_BYTES


async def ask(entry: Entry, run_id: str = "") -> Report:
    """What the swarm at ``entry.join`` does now; ``run_id`` picks one of several runs.

    Raises:
        UserError: one line that says what to do.
    """
    async with entered(entry, Limits(payload_bytes=CANONICAL_BYTES)) as swarm:
        manifest = await learn_run(swarm, entry.join, run_id)
        swarm.limit(Limits(manifest.limits.header_bytes, CANONICAL_BYTES))
        caller = Caller(swarm.transport, timeout_s=manifest.periods.call_s)
        sight = await Lookout(manifest, caller, swarm.directory).look(detail=True)
        return make_report(sight, manifest)
