"""From YAML and command line to ``(RunConfig, QeRLConfig)``: one flat name space, unknown keys refused.

Values on the command line win over the file. Every field of both dataclasses is an option ``--name value``; values are
read as YAML, so lists and dictionaries work (``--lora_target_modules '[q_proj, v_proj]'``).
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from qerl.trainer.run_config import RunConfig

_REPLACED_TAGS = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")


_PLAIN_TYPES = {"int": int, "float": float, "bool": bool, "str": str}
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


class FieldValueError(ValueError):
    """A value that its field does not take."""


class UnknownFieldError(ValueError):
    """A key that no configuration class has."""


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """``["--lr", "1e-5", "--flag", "--x=3"]`` as a dict; a name without a value is True, dashes become underscores.

    Raises:
        ValueError: a positional argument.
    """
    values: dict[str, Any] = {}
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if not argument.startswith("--"):
            raise ValueError(f"unexpected argument {argument!r}: options are --name value")
        name, separator, text = argument[2:].partition("=")
        index += 1
        if not separator and index < len(arguments) and not arguments[index].startswith("--"):
            text, separator = arguments[index], "="
            index += 1
        values[name.replace("-", "_")] = _load(text) if separator else True
    return values


class _Loader(yaml.SafeLoader):
    """YAML as people write settings: ``1e-5`` is a number and ``no``/``on`` are words; only true/false are booleans."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf|\.nan)$"),
    list("-+.0123456789"),
)


def _load(text: Any) -> Any:
    return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A recipe file as a dict.

    Raises:
        ValueError: the file holds no mapping.
    """
    with open(path, encoding="utf-8") as file:
        values = _load(file)
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold `field: value` lines, found {type(values).__name__}")
    return values


def split_fields(values: Mapping[str, Any], *classes: type) -> list[dict[str, Any]]:
    """Deal ``values`` to the dataclasses that own the names.

    Raises:
        UnknownFieldError: a name no class has, with the nearest known one.
    """
    fields = [{f.name for f in dataclasses.fields(cls) if f.init} for cls in classes]
    known = sorted(set().union(*fields))
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; `qerl train --help-all` lists all fields"
            raise UnknownFieldError(f"unknown field {name!r}{hint}")
    return [{n: v for n, v in values.items() if n in names} for names in fields]


def build_configs(values: Mapping[str, Any]) -> tuple[RunConfig, Any]:
    """The two configuration objects from one flat dict (imports TRL)."""
    from qerl.trainer.config import QeRLConfig

    run_values, trainer_values = split_fields(values, RunConfig, QeRLConfig)
    resume = trainer_values.get("resume_from_checkpoint")
    if isinstance(resume, bool):  # a bare flag, or YAML's true and false, of a field that transformers declares a word
        trainer_values["resume_from_checkpoint"] = "true" if resume else None
    check_types(run_values, RunConfig)
    check_types(trainer_values, QeRLConfig)
    try:
        return RunConfig(**run_values), QeRLConfig(**trainer_values)
    except UnknownFieldError:
        raise
    except ValueError as error:  # TRL's and transformers' own checks
        raise FieldValueError(str(error)) from error


def check_types(values: Mapping[str, Any], cls: type) -> None:
    """Numbers where numbers are declared, words where words are.

    Raises:
        FieldValueError: naming the field, the value and what it takes.
    """
    for field in dataclasses.fields(cls):
        if field.name not in values:
            continue
        value, declared = values[field.name], str(getattr(field.type, "__name__", field.type))
        allowed = [t for name, t in _PLAIN_TYPES.items() if re.search(rf"\b{name}\b", declared)]
        plain = bool(allowed) and not re.search(r"list|dict|Any|\[", declared)
        if not plain or (value is None and "None" in declared):
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = (
            (isinstance(value, bool) and bool in allowed)
            or (is_number and (float in allowed or (int in allowed and value == int(value))))
            or (isinstance(value, str) and str in allowed)
        )
        if not fits:
            takes = " or ".join(_TYPE_NAMES[t] for t in allowed)
            raise FieldValueError(f"{field.name} takes {takes}, got {value!r}")
