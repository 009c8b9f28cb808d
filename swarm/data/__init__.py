"""Data: deterministic batches, a pure function of (seed, step, microbatch)."""

from __future__ import annotations

from swarm.data.batches import ArrayBatches, Batches, TextBatches
from swarm.data.corpus import Corpus, load_corpus
from swarm.data.load import load_batches

__all__ = ["ArrayBatches", "Batches", "Corpus", "TextBatches", "load_batches", "load_corpus"]
