"""A case's `config`, read key by key: what nobody reads, and a value without a meaning, fails.

    with reading(case["config"], "a contraction") as given:
        bits = given.take("bits", 8)
        mode = given.choose("mode", {"A": 1, "B": 2})

At the end of the block every key must have been read.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_REQUIRED = object()


class CannotDrive(AssertionError):
    """There is no adapter for a case, it does not understand its config, or does not return what the case asks for."""


class Settings:
    """The keys and values of one config.

    Args:
        config: of the case.
        what: the config in an error text.
    """

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        self._config, self._what = config, what
        self._unread = set(config)
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether a key is given; asking does not count as reading it."""
        self._asked.add(name)
        return name in self._config

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a key; `default` if it is not given."""
        self._asked.add(name)
        self._unread.discard(name)
        if name in self._config:
            return self._config[name]
        if default is _REQUIRED:
            raise CannotDrive(f"{self._what}: the config has no {name!r}, but {sorted(self._config)}")
        return default

    def choose(self, name: str, table: Mapping[Any, Any], default: Any = _REQUIRED) -> Any:
        """What a value stands for in `table`; `default` if the key is not given."""
        value = self.take(name, default)
        if name not in self._config:
            return value
        return meaning(table, value, f"{self._what}: {name}")

    def nested(self, name: str) -> Mapping[str, Any]:
        """A dict within the config, empty if it is not given, to be read by a block of its own."""
        value = self.take(name, {})
        if not isinstance(value, Mapping):
            raise CannotDrive(f"{self._what}: {name} must be a dict, got {value!r}")
        return value

    def finish(self) -> None:
        """Refuse keys that were not read."""
        for name in sorted(self._unread):
            near = difflib.get_close_matches(name, self._asked, 1)
            hint = f"; did the adapter mean it by {near[0]!r}?" if near else ""
            raise CannotDrive(f"{self._what}: no adapter reads {name!r} = {self._config[name]!r}{hint}")


@contextmanager
def reading(config: Mapping[str, Any], what: str) -> Iterator[Settings]:
    """Read a config; at the end of the block every key of it must have been read."""
    given = Settings(config, what)
    yield given
    given.finish()


def meaning(table: Mapping[Any, Any], value: Any, what: str) -> Any:
    """What `value` stands for in `table`."""
    if value not in table:
        raise CannotDrive(f"{what}: {value!r} has no meaning; known are {sorted(map(str, table))}")
    return table[value]


def settings_of(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key and value of a config as VOCABULARY.json writes them: keys of inner dicts by dots, values as text."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from settings_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)
