"""Reading fields of a JSON body, with errors that name the field and the value."""

import math
from collections.abc import Mapping
from typing import Any

from qerl.serving.errors import ApiError


def whole_number(body: Mapping[str, Any], name: str, default: int | None, low: int, high: int) -> int | None:
    """An integer between ``low`` and ``high``; ``default`` where it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ApiError(f"{name} must be a whole number from {low} to {high}, got {value!r}", param=name)
    return value


def number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """A finite number between ``low`` and ``high``; ``default`` where it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ApiError(f"{name} must be a number from {low} to {high}, got {value!r}", param=name)
    if not low <= value <= high:
        raise ApiError(f"{name} must be from {low} to {high}, got {value}", param=name)
    return float(value)


def switch(body: Mapping[str, Any], name: str) -> bool:
    """true or false; false where it is missing or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {value!r}", param=name)
    return bool(value)


def text_list(body: Mapping[str, Any], name: str, most: int) -> tuple[str, ...]:
    """A string or a list of at most ``most`` strings, none of them empty."""
    value = body.get(name)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(text, str) and text for text in values):
        raise ApiError(f"{name} must be a string or a list of strings that are not empty, got {value!r}", param=name)
    if len(values) > most:
        raise ApiError(f"{name} takes at most {most} strings, got {len(values)}", param=name)
    return tuple(values)
