"""A swarm of real processes whose peers reach each other through a slow network, or directly."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import psutil

from scripts._bench import Progress
from scripts._processes import LOOPBACK, Process, Swarm
from scripts._slow_proxy import SlowNetwork

TRAINER = "trainer"
"""The name of the coordinator's key."""


class FarSwarm(Swarm):
    """A ``Swarm`` on ``network``, once it is set; without one, on loopback.

    Args:
        transport: what ``--transport`` takes. allow: models that all may run.
    """

    def __init__(
        self, manifest: str, progress: Progress, transport: str, allow: Sequence[str] = ()
    ) -> None:
        super().__init__(manifest, progress)
        self._allow = [word for model in allow for word in ("--allow-model", model)]
        self.network: SlowNetwork | None = None
        self._transport = transport
        self._names: dict[int, str | None] = {}

    def whose(self, pid: int) -> str | None:
        """The name of the peer whose process, or whose p2pd, has this id: each is told its key."""
        if pid not in self._names:
            try:
                words = " ".join(psutil.Process(pid).cmdline())
            except psutil.Error:
                return None
            found = re.search(rf"{re.escape(str(self.folder))}/([\w-]+)\.key", words)
            self._names[pid] = found[1] if found else None
        return self._names[pid]

    def coordinator(self, *arguments: object, key: str = TRAINER) -> Process:
        flags = ("--identity", self.folder / f"{key}.key", *self._way(key))
        return self.start(key, "coordinator", *arguments, *flags)

    def node(self, stage: int, key: str | None = None) -> Process:
        key = key or f"node-{stage}-{len(self.nodes)}"
        flags = ("--identity", self.folder / f"{key}.key", *self._way(key))
        words = ("node", "--join", self.address, "--stage", stage, "--stay")
        process = self.start(key, *words, *flags)
        self.nodes.append((stage, process))
        return process

    def _way(self, name: str) -> tuple[str, ...]:
        flags = (*self._allow, "--transport", self._transport, "--listen")
        if self.network is None:
            return (*flags, LOOPBACK)
        port = self.network.join(name)
        at = "/ip4/127.0.0.1/tcp/{}"
        return (*flags, at.format(port.listen), "--announce", at.format(port.announce))


@contextlib.contextmanager
def far_swarm(
    manifest: str,
    progress: Progress,
    transport: str,
    link: tuple[float, float] | None,
    allow: Sequence[str] = (),
) -> Iterator[FarSwarm]:
    """A swarm; ``link``: bits a second of each peer's up- and downlink, and seconds one way."""
    with FarSwarm(manifest, progress, transport, allow) as swarm, contextlib.ExitStack() as stack:
        if link is not None:
            swarm.network = stack.enter_context(SlowNetwork(*link, swarm.whose))
        yield swarm
