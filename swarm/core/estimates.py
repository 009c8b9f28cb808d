"""Running averages of service times that forget quickly when the world has changed."""

from __future__ import annotations

SMOOTHING = 0.1
"""Weight of a new sample in the long run (the SWARM paper's value)."""

CHANGED = 0.25
"""Two samples in a row off by more than this share, to the same side, mean a changed host."""


class Estimate:
    """An exponential moving average with bias correction, and a jump on change.

    The paper's smoothing of 0.1 alone needs some twenty samples to follow a host that became
    four times slower. Here two samples in a row that are both off to the same side replace the
    average: noise averages out, a change is followed at once.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self.samples = 0
        self._last_off: float | None = None

    def update(self, sample: float) -> float:
        """Take in ``sample`` (seconds, >= 0); returns the new average."""
        if self.value is None:
            self.value, self.samples = sample, 1
            return self.value
        off = sample - self.value
        if abs(off) <= CHANGED * self.value:
            self._last_off = None
        elif self._last_off is not None and (off > 0) == (self._last_off > self.value):
            self.value = (sample + self._last_off) / 2
            self.samples, self._last_off = 2, None
            return self.value
        else:
            self._last_off = sample
        self.samples += 1
        weight = max(SMOOTHING, 1 / self.samples)
        self.value += weight * (sample - self.value)
        return self.value

    def get(self, default: float) -> float:
        return default if self.value is None else self.value
