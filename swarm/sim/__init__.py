"""The simulator: swarms of thousands of peers on a virtual clock, decided by ``swarm.core``."""
