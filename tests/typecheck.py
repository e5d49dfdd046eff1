"""Run-time checks of the package's annotations.

jaxtyping's wrapper binds the arguments and checks them twice, so that sizes of a signature agree. Functions without shapes,
which are most functions, are checked by beartype alone, in a fraction of the time.
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

# beartype checks a random item of a list. With Python's shared generator, hypothesis would take a check in an engine's thread
# for a draw of a strategy in another thread.
codemain.getrandbits = random.Random(0).getrandbits  # pyright: ignore[reportPrivateImportUsage]
# PEP 484 allows an int for a float annotation; beartype needs this setting for it.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))

with_shapes = jaxtyping.jaxtyped


def names_shapes(annotations: Iterable[object]) -> bool:
    """Returns True if an annotation has a jaxtyping part, or is text, which may have one."""
    return any(
        isinstance(each, str)
        or str(getattr(each, "__module__", "")).partition(".")[0] == "jaxtyping"
        or (isinstance(each, type) and issubclass(each, jaxtyping.AbstractArray))
        or names_shapes(each if isinstance(each, list) else get_args(each))
        for each in annotations
    )


def checked(fn: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """Replaces `jaxtyping.jaxtyped`, with which the import hook wraps every function of a package."""
    if fn is None:
        return partial(checked, typechecker=typechecker)
    if inspect.isclass(fn):
        init = fn.__dict__.get("__init__")
        if dataclasses.is_dataclass(fn) and isinstance(init, FunctionType) and not names_shapes(init.__annotations__.values()):
            fn.__init__ = typechecker(init)  # type: ignore[misc]
            return fn
    elif isinstance(fn, classmethod | staticmethod):
        return type(fn)(checked(fn.__func__, typechecker=typechecker))
    elif isinstance(fn, property):
        return property(*(each and checked(each, typechecker=typechecker) for each in (fn.fget, fn.fset, fn.fdel)))
    elif inspect.isgeneratorfunction(fn):  # beartype's wrapper generator would count as a caller in warnings
        return with_shapes(fn, typechecker=typechecker)
    elif isinstance(fn, FunctionType) and not names_shapes(fn.__annotations__.values()):
        return fn if getattr(fn, "__no_type_check__", False) else typechecker(fn)
    return with_shapes(fn, typechecker=typechecker)


def install(package: str) -> None:
    """Installs checks in every later import of the package."""
    jaxtyping.jaxtyped = checked
    jaxtyping.install_import_hook(package, "typecheck.check")
