"""Finding extensions: the engine loads one by name, when a setting asks for it.

nanobatch/extensions/ holds what can be deleted. The engine imports none of it; a setting names
the module, and the engine talks to what it gets through a seam: a hook, a subclass, an object
with a few methods.

Always holds: an engine whose settings ask for no extension imports none.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from types import ModuleType

PACKAGE = "nanobatch.extensions"
# Settings that a ModelRunner alone does not serve, with the values that need no extension.
PLAIN = {"speculative": None, "preemption": "recompute", "tensor_parallel_size": 1}


def has_extension(name: str) -> bool:
    """Whether nanobatch/extensions/ has a module or package of this name."""
    try:
        return importlib.util.find_spec(f"{PACKAGE}.{name}") is not None
    except ModuleNotFoundError:  # no extensions/ at all
        return False


def load_extension(name: str, setting: str) -> ModuleType:
    """Import nanobatch.extensions.<name>.

    Args:
        name: of the module. setting: what asks for it, for the message: "preemption is 'swap'".

    Raises:
        ValueError: the file is not there.
    """
    if not has_extension(name):
        raise ValueError(f"{setting}; it needs nanobatch/extensions/{name}, which is missing")
    return importlib.import_module(f"{PACKAGE}.{name}")


def check_served(config: object, served: Collection[str]) -> None:
    """Raise ValueError if a setting in PLAIN asks for more, and its name is not in served."""
    for name, plain in PLAIN.items():
        value = getattr(config, name)
        if value != plain and name not in served:
            raise ValueError(
                f"{name} is {value!r}; a ModelRunner alone takes only {plain!r}: make the "
                "runner with llm.build_runner"
            )
