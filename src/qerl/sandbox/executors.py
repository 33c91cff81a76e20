"""An executor from its name, for configuration files and the command line."""

from __future__ import annotations

from qerl.sandbox.bubblewrap import Bubblewrap
from qerl.sandbox.core import Executor
from qerl.sandbox.e2b import E2B
from qerl.sandbox.piston import Piston

_PISTON = "piston:"


def executor_of(spec: str) -> Executor:
    """The executor called ``bubblewrap``, ``e2b`` or ``piston:URL`` (``piston:http://host:2000``), default limits.

    Raises:
        ValueError: Another name, or a bad URL.
    """
    if spec == "bubblewrap":
        return Bubblewrap()
    if spec == "e2b":
        return E2B()
    if spec.startswith(_PISTON):
        return Piston(spec.removeprefix(_PISTON))
    raise ValueError(f"unknown executor {spec!r}; known are bubblewrap, e2b and piston:URL")
