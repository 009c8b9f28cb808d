"""What a volunteer allows at most: bytes sent, and computing beside the machine's owner."""

from __future__ import annotations


class Bucket:
    """A limit on bytes a second, over time: how long to wait before sending some."""

    BURST_S = 1.0
    """After a pause so many seconds' worth may go at once."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    def wait_s(self, nbytes: int, now: float) -> float:
        """Seconds to wait before ``nbytes`` may go; they count as sent."""
        start = max(self._free_at, now - self.BURST_S)
        self._free_at = start + nbytes / self._bytes_per_s
        return max(0.0, self._free_at - now)


class Courtesy:
    """Whether to pause since others want this machine's processors.

    It pauses when others have had more than ``HIGH`` of them for ``LOOKS`` looks in a row, and
    goes on when they have had less than ``LOW`` for as many: so neither a moment's work nor a
    moment's rest changes anything.
    """

    HIGH, LOW, LOOKS = 0.5, 0.25, 5

    def __init__(self) -> None:
        self.paused = False
        self._against = 0

    def look(self, others: float) -> bool:
        """``others``: their part of all processors, 0 to 1. Returns whether that changed it."""
        against = others < self.LOW if self.paused else others > self.HIGH
        self._against = self._against + 1 if against else 0
        if self._against < self.LOOKS:
            return False
        self.paused, self._against = not self.paused, 0
        return True
