"""How log lines look: for people, or one JSON object a line (``--log-format json``).

An object has ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, and what ``fields`` the
line was logged with; ``event`` names what happened where a machine may want to know: ``step`` (with
step, steps, loss, samples_per_s), ``state`` (a node says what it does now, and why), ``warning``.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from enum import StrEnum
from math import isfinite
from typing import Any

FORMAT_VARIABLE = "SWARM_LOG_FORMAT"
"""In the environment, so that nodes that ``swarm local`` starts write alike."""


class LogFormat(StrEnum):
    HUMAN = "human"
    JSON = "json"


def log_format() -> LogFormat:
    """The one that was asked for; human if that is none."""
    try:
        return LogFormat(os.environ.get(FORMAT_VARIABLE, LogFormat.HUMAN))
    except ValueError:
        return LogFormat.HUMAN


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **{name: _plain(value) for name, value in getattr(record, "fields", {}).items()},
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str, allow_nan=False)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def formatter() -> logging.Formatter:
    if log_format() is LogFormat.JSON:
        return JsonFormatter()
    return logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")


def tell(logger: logging.Logger, event: str, message: str, **fields: Any) -> None:
    """Log that ``event`` happened, with ``fields``."""
    logger.info("%s", message, extra={"fields": {"event": event, **fields}})
