"""The text forms of a manifest: TOML for people, and one line for what is wrong with it.

``emit_toml`` writes just what a manifest holds: scalars, lists of scalars, tables of these.
``first_error`` turns pydantic's report into the one ``ConfigError`` that the user sees.
"""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Mapping

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from swarm.errors import ConfigError

_GIVEN_LENGTH = 80


def emit_toml(tree: Mapping[str, object], path: tuple[str, ...] = ()) -> str:
    """``tree`` as TOML. Values are str, bool, int, float, lists of these, or tables."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in tree.items() if not isinstance(v, Mapping)]
    if path and (lines or not tree):
        lines.insert(0, f"\n[{'.'.join(_key(part) for part in path)}]")
    text = "".join(line + "\n" for line in lines)
    tables = {k: v for k, v in tree.items() if isinstance(v, Mapping)}
    return text + "".join(emit_toml(v, (*path, k)) for k, v in tables.items())


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "a").replace("-", "a").isalnum()
    return key if bare else _string(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"no TOML form for {type(value).__name__}")


def _string(text: str) -> str:
    # JSON's escapes are TOML's; only DEL must be escaped in TOML and is not in JSON.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def first_error(error: ValidationError, root: type[BaseModel]) -> ConfigError:
    """The first problem that pydantic found in a ``root``, naming field, given and allowed."""
    problem = error.errors(include_url=False, include_context=False)[0]
    location = problem["loc"]
    path, field, siblings = _walk(root, location)
    if problem["type"] == "extra_forbidden":
        return ConfigError(path, shown(problem["input"]), _no_such(path, siblings))
    if not path:
        return ConfigError("manifest", shown(problem["input"]), _table_of(root))
    allowed = _allowed(field) or problem["msg"].splitlines()[0]
    return ConfigError(path, shown(problem["input"]), allowed)


def _no_such(path: str, siblings: list[str]) -> str:
    close = difflib.get_close_matches(path.rpartition(".")[2], siblings, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"no field of this name; {hint}there are " + ", ".join(siblings)


def _walk(
    root: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[str, FieldInfo | None, list[str]]:
    """Dotted path, declaration (None: there is none) and the names of the table it is in.

    Inside a list or free table the path ends with the index or key: what pydantic adds beyond
    that are names of its own.
    """
    model: object = root
    field: FieldInfo | None = None
    siblings: list[str] = []
    parts: list[str] = []
    for part in location:
        parts.append(_printable(part))
        if not _is_table(model):
            break
        table = typing.cast(type[BaseModel], model)
        siblings = list(table.model_fields)
        field = table.model_fields.get(str(part))
        model = field.annotation if field else None
    return ".".join(parts), field, siblings


def _allowed(field: FieldInfo | None) -> str | None:
    """What a field says of itself: the text stored where it is declared."""
    if field is None:
        return None
    if _is_table(field.annotation):
        return _table_of(typing.cast(type[BaseModel], field.annotation))
    extra = field.json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) and "allowed" in extra else None


def _table_of(model: type[BaseModel]) -> str:
    return "a table with " + ", ".join(model.model_fields)


def _is_table(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _printable(part: object) -> str:
    text = str(part)[:_GIVEN_LENGTH]
    return text if text.isprintable() else ascii(text)


def shown(value: object) -> object:
    """``value`` itself if its repr is short, else the beginning of it, on one line."""
    if isinstance(value, Mapping):
        return "a table"
    text = repr(value)
    return value if len(text) <= _GIVEN_LENGTH else text[:_GIVEN_LENGTH] + "..."
