"""Turns a class into a frozen dataclass as `dataclasses.dataclass` does, but compiles no text for its methods.

Assumes `frozen=True` and no `__post_init__`. A command reads some hundred such classes before it does anything, and a
compiled `__init__`, `__eq__` and so on take 0.7 ms of each: half of a short check. The methods here look up the fields
when they are called, which is slower: a class of which very many are made, as of a long text, gets its own `__init__`.
A `__hash__` of the class's own is kept. Does not check types.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool, slots: bool = False, eq: bool = True) -> Any:
        assert frozen

        def decorate(cls: type) -> type:
            cls.__doc__ = cls.__doc__ or cls.__name__  # or else `dataclasses` makes one of the signature
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
            for name in METHODS if slots else METHODS[:3]:
                setattr(made, name, getattr(_Record, name))
            made.__init__ = _counted(made)
            if eq:
                made.__eq__, by_value = _by_value(made)
                made.__hash__ = vars(cls).get("__hash__") or by_value
            return made

        return decorate


MANY = 1000
"""Instances before a class has an `__init__` compiled: that takes as long as some hundred of them."""

METHODS = ("__repr__", "__setattr__", "__delattr__", "__getstate__", "__setstate__")
"""What each class takes of `_Record`; the last two are for slots, which pickle would set one by one."""


class _Record:
    __dataclass_fields__: dict[str, dataclasses.Field[Any]]
    __match_args__: tuple[str, ...]

    def __repr__(self) -> str:
        shown = (name for name, field in self.__dataclass_fields__.items() if field.repr)
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __getstate__(self) -> list[Any]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def __setstate__(self, state: list[Any]) -> None:
        for name, value in zip(self.__dataclass_fields__, state, strict=True):
            _store(self, name, value)


_store = object.__setattr__


def _begin(self: Any, /, *values: Any, **named: Any) -> None:
    fields = self.__dataclass_fields__
    given = dict(zip(self.__match_args__, values, strict=False), **named)
    if len(given) < len(values) + len(named) or not given.keys() <= fields.keys():
        takes = ", ".join(fields)
        raise TypeError(f"{type(self).__name__}({takes}) was given {len(values)} values and {[*named]}")
    if len(given) < len(fields):
        given = {name: given.get(name, field.default) for name, field in fields.items()}
        for name, value in given.items():
            if value is dataclasses.MISSING:
                raise TypeError(f"{type(self).__name__} was not given `{name}`")
    if hasattr(self, "__dict__"):
        self.__dict__.update(given)
    else:
        for name, value in given.items():
            _store(self, name, value)


def _counted(made: Any) -> Any:
    """What begins an instance, until there are many."""
    left = MANY

    def begin(self: Any, /, *values: Any, **named: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            made.__init__ = _compiled(made)
        _begin(self, *values, **named)

    return begin


def _compiled(made: Any) -> Any:
    """An `__init__` that takes these fields alone, as `dataclasses` writes it."""
    fields, names = made.__dataclass_fields__, made.__match_args__
    defaults = {f"_{name}": one.default for name, one in fields.items() if one.default is not dataclasses.MISSING}
    takes = {name: f"{name}=_{name}" if f"_{name}" in defaults else name for name in fields}
    only = [takes[name] for name in fields if name not in names]
    head = ", ".join(("self", *(takes[name] for name in names), *(("*", *only) if only else ())))
    body = "".join(f"\n    _store(self, {name!r}, {name})" for name in fields)
    space = {"_store": _store} | defaults
    exec(f"def __init__({head}):{body}", space)
    return space["__init__"]


def _by_value(made: Any) -> tuple[Any, Any]:
    """Equality and hash over the fields that are compared."""
    names = [field.name for field in dataclasses.fields(made) if field.compare]
    key: Any = attrgetter(*names) if names else lambda _: ()

    def equal(self: Any, other: object) -> Any:
        return key(self) == key(other) if type(other) is type(self) else NotImplemented

    return equal, lambda self: hash(key(self))
