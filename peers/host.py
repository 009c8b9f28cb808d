"""What the parts of a node share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from anyio.abc import TaskGroup

from peers.executor import Executor
from peers.rpc import Caller
from peers.stage import StageOwner
from swarm.manifest import Manifest
from swarm.types import PeerId, Replica


@dataclass(slots=True)
class Host:
    """One replica's means: its stage, its name, how it calls, where it computes.

    ``trainer`` is who receipts and votes go to: the last trainer that was obeyed, if any.
    """

    manifest: Manifest
    stage: StageOwner
    me: Replica
    caller: Caller
    executor: Executor
    tasks: TaskGroup
    rng: random.Random
    trainer: PeerId | None = None
