"""Draw a small example of every figure as a PNG: python -m nanobatch.viz --gallery DIR"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from nanobatch import viz


def examples() -> dict[str, Callable[[], Figure]]:
    """The examples of all modules of viz, by name."""
    found = {}
    for info in pkgutil.iter_modules(viz.__path__):
        if info.name == "__main__":
            continue
        module = importlib.import_module(f"nanobatch.viz.{info.name}")
        for name, example in getattr(module, "EXAMPLES", {}).items():
            is_named = name.startswith(info.name)
            found[name if is_named else f"{info.name}_{name}"] = example
    return found


def main() -> None:
    """Write a PNG of each example into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gallery", metavar="DIR", type=Path, required=True)
    folder = parser.parse_args().gallery
    folder.mkdir(parents=True, exist_ok=True)
    for name, example in examples().items():
        file = folder / f"{name}.png"
        example().savefig(file, dpi=110)
        print(file.name)


if __name__ == "__main__":
    main()
