"""Checks of annotations that tests put around the package.

jaxtyping's own wrapper binds the arguments and checks them twice, so that the sizes in a signature's shapes agree. Most
functions name no shapes: beartype alone checks these, in a small part of the time.
"""

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype._check.code import codemain

# beartype draws which item of a list it checks. From Python's shared generator, a check in an engine's thread would look
# to hypothesis as if the strategy of another thread had drawn from it.
codemain.getrandbits = random.Random(0).getrandbits  # pyright: ignore[reportPrivateImportUsage]
# An int where the annotation says float is right by PEP 484's numeric tower, which beartype leaves out unless told.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))

with_shapes = jaxtyping.jaxtyped


def names_shapes(annotations: Iterable[object]) -> bool:
    """Whether one of them, or a part of one, is jaxtyping's; text could be, too."""
    return any(
        isinstance(each, str)
        or str(getattr(each, "__module__", "")).partition(".")[0] == "jaxtyping"
        or (isinstance(each, type) and issubclass(each, jaxtyping.AbstractArray))
        or names_shapes(each if isinstance(each, list) else get_args(each))
        for each in annotations
    )


def checked(fn: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """In the place of `jaxtyping.jaxtyped`, which wraps every function of a package under its import hook."""
    if fn is None:
        return partial(checked, typechecker=typechecker)
    if inspect.isclass(fn):
        own = fn.__dict__.get("__init__")
        if dataclasses.is_dataclass(fn) and isinstance(own, FunctionType) and not names_shapes(own.__annotations__.values()):
            fn.__init__ = typechecker(own)  # type: ignore[misc]
            return fn
    elif isinstance(fn, classmethod | staticmethod):
        return type(fn)(checked(fn.__func__, typechecker=typechecker))
    elif isinstance(fn, property):
        return property(*(each and checked(each, typechecker=typechecker) for each in (fn.fget, fn.fset, fn.fdel)))
    elif inspect.isgeneratorfunction(fn):  # beartype would put a generator around it, which warnings count as a caller
        return with_shapes(fn, typechecker=typechecker)
    elif isinstance(fn, FunctionType) and not names_shapes(fn.__annotations__.values()):
        return fn if getattr(fn, "__no_type_check__", False) else typechecker(fn)
    return with_shapes(fn, typechecker=typechecker)


def install(package: str) -> None:
    """From here on, every import of the package checks its annotations: wrong shapes fail where they enter."""
    jaxtyping.jaxtyped = checked
    jaxtyping.install_import_hook(package, "typecheck.check")
