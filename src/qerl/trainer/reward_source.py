"""Reward functions that a recipe names: ``module:function`` or ``path/to/file.py:function``.

This runs code that the user names, as ``python file.py`` would; nothing is fetched. Functions follow TRL's convention,
``fn(prompts, completions, **columns) -> list[float | None]`` (see :mod:`qerl.trainer.trainer`).
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

Reward = Callable[..., Any]


class RewardSourceError(ValueError):
    """A reward function that a recipe names and that is not there or cannot be called."""


def load_reward_functions(specs: Sequence[str]) -> list[Reward]:
    """The functions of ``specs``, in order.

    Raises:
        RewardSourceError: no such file, module or function (with near names), or a signature TRL cannot call.
    """
    return [_load(spec) for spec in specs]


def _load(spec: str) -> Reward:
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name.isidentifier():
        raise RewardSourceError(f"reward_funcs: {spec!r} is not module:function or path/to/file.py:function")
    is_file = place.endswith(".py") or "/" in place
    module = _import_file(Path(place).expanduser(), spec) if is_file else _import_module(place, spec)
    if not hasattr(module, name):
        raise RewardSourceError(f"reward_funcs: {place} has no {name!r}{_hint(module, name)}")
    function = getattr(module, name)
    _check_signature(function, spec)
    return function


def _import_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise RewardSourceError(f"reward_funcs: {spec!r}: no file {path} (relative paths start at {Path.cwd()})")
    path = path.resolve()
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None or importlib.util.find_spec(name) is not None:
        # A file called json.py must not take the place of the module json.
        name = f"qerl_reward_{path.stem}"
    # Its neighbours can be imported, and reward workers find the module by its name.
    _make_importable(path.parent)
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise RewardSourceError(f"reward_funcs: {path} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str, spec: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # One that the user's own module imports and that is missing is the user's to see as it is.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        raise RewardSourceError(
            f"reward_funcs: {spec!r}: no module {error.name!r} here ({Path.cwd()}) or among the installed packages; "
            "a file is named with its path, such as rewards/mine.py:function"
        ) from error


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _hint(module: ModuleType, name: str) -> str:
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__]
    near = difflib.get_close_matches(name, own, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; it has {', '.join(sorted(own)[:8])}" if own else "; it has no functions"


def _check_signature(function: Any, spec: str) -> None:
    """TRL calls with keywords: prompts, completions, the columns of the data set, and some of its own."""
    if inspect.isclass(function) or not callable(function):
        kind = "a class; name an instance of it" if inspect.isclass(function) else f"of type {type(function).__name__}"
        raise RewardSourceError(f"reward_funcs: {spec!r} is {kind}, not a function")
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    if not takes_all:
        raise RewardSourceError(
            f"reward_funcs: {spec} takes {', '.join(sorted(names)) or 'nothing'}; it must take completions (and what "
            "it needs of prompts and the task's columns, such as answer) and **kwargs for the rest"
        )
