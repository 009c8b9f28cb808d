"""What one would use instead of our averaging: hivemind's, and gloo's all_reduce.

``python -m scripts._averaging_others hivemind|gloo LENGTH RANK SIZE FOLDER`` is one of SIZE peers
that hold a vector of LENGTH float32. Each kind is set for speed on loopback, and checks its result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from scripts._averaging_group import say

WINDOW_S = 0.05
"""hivemind waits so long for a group to fill; with less, groups of four fall apart."""


class Other(ABC):
    """One peer. ``vector`` is averaged in place."""

    def __init__(self, length: int, rank: int, size: int, folder: Path) -> None:
        self.length, self.rank, self.size, self.folder = length, rank, size, folder

    @abstractmethod
    def connect(self, addresses: list[str]) -> list[str]:
        """Enter the group by way of ``addresses``; our own."""

    @abstractmethod
    def average(self, value: float) -> float:
        """Average a vector full of ``value``; what is in the result."""

    def close(self) -> None:
        return


class Gloo(Other):
    def connect(self, addresses: list[str]) -> list[str]:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/store",
            rank=self.rank,
            world_size=self.size,
        )
        self._reduce, self._barrier = dist.all_reduce, dist.barrier
        self._vector = torch.zeros(self.length)
        return []

    def average(self, value: float) -> float:
        self._vector.fill_(value / self.size)
        self._barrier()
        began = time.perf_counter()
        self._reduce(self._vector)
        self.seconds = time.perf_counter() - began
        return float(self._vector.mean())


class Hivemind(Other):
    def connect(self, addresses: list[str]) -> list[str]:
        import hivemind
        from hivemind.averaging.partition import AllreduceException

        self._failure = AllreduceException
        self._dht = hivemind.DHT(
            host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=addresses, start=True
        )
        self._averager = hivemind.averaging.DecentralizedAverager(
            [torch.zeros(self.length)],
            self._dht,
            prefix="bench",
            start=True,
            target_group_size=self.size,
            min_group_size=self.size,
            min_matchmaking_time=WINDOW_S,
            request_timeout=WINDOW_S / 2,
            part_size_bytes=1 << 20,
            compression=hivemind.compression.NoCompression(),
            declare_state_period=3600,
        )
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def average(self, value: float) -> float:
        with self._averager.get_tensors() as (vector,):
            vector.fill_(value)
        began = time.perf_counter()
        try:
            self._averager.step(timeout=3)
        except self._failure:
            return float("nan")
        finally:
            self.seconds = time.perf_counter() - began
        with self._averager.get_tensors() as (vector,):
            return float(vector.mean())

    def close(self) -> None:
        self._averager.shutdown()
        self._dht.shutdown()


KINDS: dict[str, type[Other]] = {"hivemind": Hivemind, "gloo": Gloo}


def obey(other: Other, order: dict[str, Any]) -> dict[str, Any]:
    match order:
        case {"do": "connect", "addresses": addresses}:
            return {"addresses": other.connect(addresses)}
        case {"do": "average"}:
            mean = other.average(float(other.rank))
            whole = abs(mean - (other.size - 1) / 2) < 1e-4
            return {"seconds": other.seconds, "whole": whole}
    raise ValueError(f"not an order: {order}")


def main() -> None:
    torch.set_num_threads(1)
    kind, length, rank, size, folder = sys.argv[1:]
    other = KINDS[kind](int(length), int(rank), int(size), Path(folder))
    say({})
    while line := sys.stdin.readline():
        say(obey(other, json.loads(line)))
    other.close()


if __name__ == "__main__":
    main()
