"""Finding extensions: the engine loads one by name, when a setting asks for it.

nanobatch/extensions/ holds what can be deleted. The engine imports none of it; a setting names
the module, and the engine talks to what it gets through a seam: a hook, a subclass, an object
with a few methods.

Always holds: an engine whose settings ask for no extension imports none.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

PACKAGE = "nanobatch.extensions"


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
