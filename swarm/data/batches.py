"""Batches: which samples microbatch ``m`` of step ``step`` holds. Nothing depends on call order."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np

from swarm.data.corpus import Corpus, check_holdout, check_length
from swarm.errors import ConfigError, DataError


class Batches(Protocol):
    """Microbatches by number. The arrays returned are contiguous and the caller's own."""

    def train(self, step: int, m: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of microbatch ``m`` of ``step``: the same at every call."""
        ...

    def evaluation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the held-out microbatch ``index``, which wraps around."""
        ...


class TextBatches:
    """Windows of a corpus. Inputs and targets: uint8 (microbatch, sequence), targets one ahead.

    Training windows start anywhere in the training part; held-out windows are fixed, spread
    evenly over the held-out part, and so are those of each microbatch by themselves.

    Raises:
        ConfigError: a size below 1.
        DataError: a part of the corpus is shorter than one window and its target.
    """

    def __init__(self, corpus: Corpus, *, sequence: int, microbatch: int, seed: int) -> None:
        _check_positive("model.sequence", sequence)
        _check_positive("batch.microbatch", microbatch)
        check_length(corpus, sequence + 1)
        self._corpus = corpus
        self._microbatch = microbatch
        self._seed = seed
        self._window = np.arange(sequence + 1)
        windows = (len(corpus.holdout) - 1) // sequence
        self.evaluation_count = max(1, windows // microbatch)
        """How many held-out microbatches there are before ``index`` wraps."""

    def train(self, step: int, m: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = self._corpus.train
        starts = draw(
            self._seed,
            step,
            m,
            count=self._microbatch,
            below=len(tokens) - len(self._window) + 1,
        )
        return self._windows(tokens, starts)

    def evaluation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = self._corpus.holdout
        first = index % self.evaluation_count
        places = first + self.evaluation_count * np.arange(self._microbatch)
        last_start = len(tokens) - len(self._window)
        last_place = max(1, self.evaluation_count * self._microbatch - 1)
        return self._windows(tokens, places * last_start // last_place)

    def _windows(self, tokens: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        windows = tokens[starts[:, np.newaxis] + self._window]
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


class ArrayBatches:
    """Samples of two arrays in memory whose first dimension counts the samples.

    Training samples are drawn with replacement from the first part; the last ``holdout``
    fraction, rounded down, is held out and read in order. Inputs and targets have the arrays'
    dtypes and shapes, with ``microbatch`` as first dimension.

    Raises:
        ConfigError: ``holdout`` is not between 0 and 1, or ``microbatch`` below 1.
        DataError: the arrays differ in length, or are too short to be parted.
    """

    def __init__(
        self,
        inputs: np.ndarray,
        targets: np.ndarray,
        *,
        holdout: float,
        microbatch: int,
        seed: int,
    ) -> None:
        check_holdout(holdout)
        _check_positive("batch.microbatch", microbatch)
        if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
            raise DataError(
                f"data arrays of shapes {inputs.shape} and {targets.shape}: "
                "inputs and targets need the same first dimension"
            )
        self._held_out = int(len(inputs) * holdout)
        self._split = len(inputs) - self._held_out
        if self._held_out == 0:
            raise DataError(
                f"{len(inputs)} samples are too few to hold out a fraction of {holdout}: "
                "give more samples or raise data.holdout"
            )
        self._inputs = inputs
        self._targets = targets
        self._microbatch = microbatch
        self._seed = seed
        self.evaluation_count = -(-self._held_out // microbatch)
        """How many held-out microbatches there are before ``index`` wraps."""

    def train(self, step: int, m: int) -> tuple[np.ndarray, np.ndarray]:
        return self._take(draw(self._seed, step, m, count=self._microbatch, below=self._split))

    def evaluation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        first = index % self.evaluation_count * self._microbatch
        places = (first + np.arange(self._microbatch)) % self._held_out
        return self._take(self._split + places)

    def _take(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._inputs[places], self._targets[places]


def draw(seed: int, step: int, m: int, *, count: int, below: int) -> np.ndarray:
    """``count`` random int64 in ``[0, below)``, a pure function of all arguments.

    A counter-based generator keyed by a hash of (seed, step, m). Its raw output is used, which
    numpy keeps the same from version to version; that of ``numpy.random.Generator`` may change.
    """
    digest = hashlib.sha256(f"batch {seed} {step} {m}".encode()).digest()
    philox = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    raw = np.asarray(philox.random_raw(count), dtype=np.uint64)
    return (raw % np.uint64(below)).astype(np.int64)


def _check_positive(field: str, given: int) -> None:
    if given < 1:
        raise ConfigError(field, given, "1 or more")
