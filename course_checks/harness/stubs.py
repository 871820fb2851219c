"""Whether what a learner hands in is still the stub of the lab, told from its bytecode: nothing runs for it."""

from __future__ import annotations

import dis
import types
from typing import Any

_IDLE = {"RESUME", "NOP", "CACHE", "COPY_FREE_VARS", "LOAD_CONST", "POP_TOP", "RETURN_VALUE", "RETURN_CONST"}


def untouched(value: Any) -> bool:
    """True for a function whose whole body is `...`, `pass` or a docstring, and for a class of nothing but such."""
    if isinstance(value, type):
        if any(base is not object and not base.__module__.startswith("torch.") for base in value.__mro__[1:]):
            return False  # what it inherits may be the work
        methods = _methods(value)
        return bool(methods) and all(map(untouched, methods.values()))
    if not isinstance(value, types.FunctionType):
        return False
    steps = list(dis.get_instructions(value))
    if any(step.opname not in _IDLE for step in steps):
        return False
    loads = [step.argval for step in steps if step.opname in ("LOAD_CONST", "RETURN_CONST")]
    return loads[-1] is None or loads[-1] is ...


def _methods(cls: type) -> dict[str, types.FunctionType]:
    members = {name: getattr(member, "__func__", member) for name, member in vars(cls).items()}
    return {name: member for name, member in members.items() if isinstance(member, types.FunctionType)}


def always_stops(value: Any, *, follow: bool = True) -> bool:
    """True where every call ends in `raise NotImplementedError`: a straight line to it, or to a neighbour's that does.

    A class stops in its __init__, or in every other method. What branches, loops
    or catches may still come to an end of its own, so it has to run.
    """
    if isinstance(value, type):
        methods = _methods(value)
        made = methods.pop("__init__", None)
        stops = bool(methods) and all(always_stops(method, follow=follow) for method in methods.values())
        return stops or (made is not None and always_stops(made, follow=follow))
    if not isinstance(value, types.FunctionType) or value.__code__.co_exceptiontable:
        return False
    steps = list(dis.get_instructions(value))
    if any("JUMP" in step.opname for step in steps):
        return False
    names = [step.argval for step in steps if step.opname == "LOAD_GLOBAL"]
    if "NotImplementedError" in names and any(step.opname == "RAISE_VARARGS" for step in steps):
        return True
    called = [value.__globals__.get(name) for name in names] if follow else []
    neighbours = [each for each in called if getattr(each, "__module__", None) == value.__module__]  # no library's
    return any(always_stops(each, follow=False) for each in neighbours)
