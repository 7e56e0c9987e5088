"""What a group's config is made of, as people write it: tables of a file, arguments of a call."""

import enum
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from elasticep.errors import ConfigError, SpecError
from elasticep.spec import ExchangeSpec

_E = TypeVar("_E", bound=enum.StrEnum)


def pairs(group: str, given: Any) -> tuple[tuple[str, ExchangeSpec], ...]:
    """Exchanges in their order, from pairs or a mapping."""
    try:
        pairs = tuple((name, spec) for name, spec in dict(given).items())
        if not isinstance(given, Mapping) and len(pairs) != len(given):
            names = ", ".join(str(name) for name, _ in given)
            raise ConfigError(f"group {group!r} names an exchange twice: {names}")
    except (TypeError, ValueError):
        raise ConfigError(
            f"group {group!r}: exchanges must be pairs of a name and an ExchangeSpec"
        ) from None
    for name, spec in pairs:
        if not isinstance(spec, ExchangeSpec):
            raise ConfigError(
                f"group {group!r}: exchange {name!r} is a {type(spec).__name__}; give an "
                'ExchangeSpec, such as ExchangeSpec.preset("ROUTED", max_tokens=128)'
            )
    return pairs


def table(data: Mapping[str, Any], name: str, *, optional: bool = False) -> Mapping[str, Any]:
    """A table of a group's file; `ConfigError` when it is absent, or something else."""
    value = data.get(name, {} if optional else None)
    if not isinstance(value, Mapping):
        if name in data:
            raise ConfigError(f"{name} is {value!r} in the group file; it must be a table")
        raise ConfigError(f"the group file lacks the table [{name}]")
    return value


def read_exchange(name: str, plain: Any) -> ExchangeSpec:
    """The exchange that a table of settings describes."""
    if not isinstance(plain, Mapping):
        raise ConfigError(f"exchange {name!r} must be a table of settings")
    try:
        return ExchangeSpec.from_dict(dict(plain))
    except SpecError as error:
        raise SpecError(f"exchange {name!r}: {error}") from None


def choice(kind: type[_E], name: str, data: Mapping[str, Any]) -> _E:
    """A word of `kind`, its first if `data` does not say; `ConfigError` names all of them."""
    value = data.get(name, next(iter(kind)))
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(
            f"{name} is {value!r}; use one of {', '.join(member.value for member in kind)}"
        ) from None


def differences(path: str, mine: Any, theirs: Any) -> Iterator[str]:
    """Where two plain configs differ, one sentence each."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*mine, *theirs}):
            where = f"{path}.{key}" if path else str(key)
            yield from differences(where, mine.get(key), theirs.get(key))
    elif mine != theirs:
        yield f"{path} is {mine!r} in the group and {theirs!r} here"
