"""swarm decides: no socket, no thread, no clock, no global random source in here."""

__version__ = "0.1.0"
