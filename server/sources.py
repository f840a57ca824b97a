"""Reads settings for a tree of msgspec Structs from a TOML file, the environment and a command line.

A setting is a leaf of the tree, named by its path: `tiers.dram.capacity` in the file,
CAIRN_TIERS__DRAM__CAPACITY in the environment, `--tiers.dram.capacity` on the command line. Entries of a list
go by number: `tenants.0.token`. Variables without "__" are no settings: CAIRN_TOKEN is the client's, and
orchestrators inject variables of their own. Services may share a file and an environment: what is of a section
that only others have is passed over there, and refused on a command line. A leaf's type may be Annotated with a
msgspec Meta whose `extra` says what is `expected`, its `units` (largest first), and whether it is `secret`.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from kvstore.errors import ConfigError

PREFIX: Final = "CAIRN_"
MASK: Final = "********"
SECTIONS: Final = frozenset(  # of all services: node, conductor, gateway, worker
    {
        *("node", "tiers", "index", "copier", "limits", "rest", "rdma", "cluster", "events", "tenants", "log"),
        *("conductor", "scaling", "gateway", "worker"),
    }
)
Tree = TypeVar("Tree", bound=msgspec.Struct)

QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Given(NamedTuple):
    """A value that a source gives, converted to its type (bytes, seconds), and which source that is."""

    value: Any
    origin: str


class _Source(NamedTuple):
    place: str  # before a name, where the name alone does not say it
    spell: Callable[[str], str]  # how this source writes a setting's name
    strict: bool  # values have types here; elsewhere all are text


def collect(
    tree: type[msgspec.Struct], path: Path | None, environ: Mapping[str, str], options: Sequence[str]
) -> dict[str, Given]:
    """The settings that are given, by name. The environment outweighs the file, and the command line both.

    Raises ConfigError for a setting that `tree` does not have, and for a value that is not of its type.
    """
    leaves = {name: hint for name, hint, _ in describe(tree)}
    foreign = SECTIONS - set(tree.__struct_fields__)
    given: dict[str, Given] = {}
    if path is not None:
        source = _Source(f"{path}: ", str, strict=True)
        found = _native(_flatten(_read(path), ""), foreign)
        given |= {name: _take(leaves, source, name, raw) for name, raw in found}
    source = _Source("", _variable, strict=False)
    found = _native(_variables(leaves, environ), foreign)
    given |= {name: _take(leaves, source, name, raw) for name, raw in found}
    source = _Source("", _option, strict=False)
    given |= {name: _take(leaves, source, name, raw) for name, raw in _words(options)}
    return given


def build(tree: type[Tree], given: Mapping[str, Given]) -> Tree:
    """The tree with what is given, and defaults. Raises ConfigError if a list's entry lacks what it needs."""
    document: dict[str, Any] = {}
    for name, (value, _) in given.items():
        *path, last = name.split(".")
        table = document
        for step in path:
            table = table.setdefault(step, {})
        table[last] = value
    for field in msgspec.structs.fields(tree):
        if get_origin(field.type) is tuple:
            document[field.name] = _entries(field.name, document.get(field.name, {}))
    try:
        return msgspec.convert(document, tree)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace("$.", "")) from error


def describe(tree: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The name, type and default of every setting; those of a list's entries like `tenants.*.token`."""
    for field in msgspec.structs.fields(tree):
        name = path + field.name
        if get_origin(field.type) is tuple:
            yield from describe(get_args(field.type)[0], f"{name}.*.")
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from describe(field.type, f"{name}.")
        else:
            yield name, field.type, field.default


def walk(table: msgspec.Struct, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The name, type and value of every setting in a tree."""
    for field in msgspec.structs.fields(table):
        name, value = path + field.name, getattr(table, field.name)
        if isinstance(value, msgspec.Struct):
            yield from walk(value, f"{name}.")
        elif isinstance(value, tuple):
            for index, entry in enumerate(value):
                yield from walk(entry, f"{name}.{index}.")
        else:
            yield name, field.type, value


def show(value: Any, hint: Any) -> str:
    """A value as it could be written in a source, secrets masked; nothing for a default that there is not."""
    extra = _extra(hint)
    if value is msgspec.NODEFAULT:
        return ""
    if extra.get("secret") and value:
        return MASK
    if units := extra.get("units"):
        exact = Decimal(str(value))
        *_, smallest = units
        whole = (unit for unit in units if (exact % units[unit] == 0 if exact else units[unit] == 1))
        unit = next(whole, smallest)
        return f"{(exact / units[unit]).normalize():f}{unit}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def quantity(text: str, units: Mapping[str, int | Decimal]) -> Decimal:
    """A number and perhaps one of `units`, "1.5GiB", times the unit's factor. Raises ValueError."""
    match = QUANTITY.fullmatch(text)
    if not match:
        raise ValueError(text)
    number, unit = match.groups()
    if unit and unit not in units:
        raise ValueError(unit)
    return Decimal(number) * units.get(unit, 1)


def _entries(name: str, numbered: Mapping[str, Any]) -> list[Any]:
    numbers = [str(number) for number in range(len(numbered))]
    if set(numbered) != set(numbers):
        raise ConfigError(f"{name} are numbered from 0 without gaps, not {', '.join(sorted(numbered))}")
    return [numbered[number] for number in numbers]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{name}.{index}")
    else:
        yield name, value


def _native(found: Iterable[tuple[str, Any]], foreign: Set[str]) -> Iterator[tuple[str, Any]]:
    """Without what is for other services."""
    return ((name, raw) for name, raw in found if name.partition(".")[0] not in foreign)


def _variables(leaves: Iterable[str], environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    one_underscore = {_variable(name).replace("__", "_"): _variable(name) for name in leaves}
    for variable in sorted(environ):
        if variable in one_underscore:
            raise ConfigError(f"{variable}: there is no such setting; did you mean {one_underscore[variable]}?")
        if variable.startswith(PREFIX) and "__" in variable:
            yield variable.removeprefix(PREFIX).lower().replace("__", "."), environ[variable]


def _words(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"{word}: expected an option like --tiers.dram.capacity 32GiB")
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ConfigError(f"{word}: needs a value")
        yield name.removeprefix("--"), value


def _variable(name: str) -> str:
    return PREFIX + name.upper().replace(".", "__")


def _option(name: str) -> str:
    return f"--{name}"


def _take(leaves: Mapping[str, Any], source: _Source, name: str, raw: Any) -> Given:
    label = source.place + source.spell(name)
    pattern = re.sub(r"\.(0|[1-9]\d*)\.", ".*.", name)
    if pattern not in leaves:
        nearest = _nearest(pattern, leaves)
        hint = f"; did you mean {source.spell(nearest)}?" if nearest else ""
        raise ConfigError(f"{label}: there is no such setting{hint}")
    try:
        value = _convert(raw, leaves[pattern], source)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{label}: {_complaint(raw, leaves[pattern])}") from error
    return Given(value, source.place.removesuffix(": ") or label)


def _nearest(name: str, leaves: Iterable[str]) -> str | None:
    last = name.rpartition(".")[2]
    ends: dict[str, str] = {}
    for leaf in leaves:
        ends.setdefault(leaf.rpartition(".")[2], leaf)
    close = get_close_matches(name, leaves, 1, 0.75) or [ends[end] for end in get_close_matches(last, ends, 1, 0.75)]
    return close[0] if close else None


def _convert(raw: Any, hint: Any, source: _Source) -> Any:
    units = _extra(hint).get("units")
    if units is None or not isinstance(raw, str):
        return msgspec.convert(raw, hint, strict=source.strict)
    exact = quantity(raw, units)
    return msgspec.convert(int(exact) if exact == int(exact) else float(exact), hint)


def _complaint(raw: Any, hint: Any) -> str:
    extra = _extra(hint)
    if extra.get("secret"):
        return f"expected {extra['expected']}"
    if get_origin(hint) is Literal:
        close = get_close_matches(str(raw), get_args(hint), 1, 0.4)
        nearest = f"; did you mean {close[0]}?" if close else ""
        return f"expected one of {', '.join(get_args(hint))}, not {raw!r}{nearest}"
    expected = extra.get("expected") or {bool: "true or false", str: "text"}[hint]
    return f"expected {expected}, not {raw!r}"


def _extra(hint: Any) -> dict[str, Any]:
    return hint.__metadata__[0].extra if get_origin(hint) is Annotated else {}
