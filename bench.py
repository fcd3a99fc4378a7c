"""Measure batching: the same requests through every rung of the ladder, and more.

    python bench.py                              a table, under a minute, nothing to download
    python bench.py --save-json out.json --plot out.png
    python bench.py simulate llama-2-7b@a100-80gb --compare policy --request-rate 8
    python bench.py compare --model smollm2 --baseline vllm --baseline hf --workload W1
    python bench.py speculative --model smollm2
    python bench.py kernels
    python bench.py host
    python bench.py check 60
    python bench.py gpu                          all that one visit to a GPU should bring home

`python bench.py --help` lists the subcommands; each has only its own flags, and its own --help.
Results, hardware and what the figures mean: nanobatch/bench/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from nanobatch.bench import cli


def main(argv: Sequence[str] | None = None) -> dict:
    """Run a command line; returns the report."""
    return cli.main(argv, load_figures)


def load_figures() -> ModuleType:
    """What draws for --plot: nanobatch.viz, with matplotlib."""
    from nanobatch import viz

    return viz


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # what was asked for cannot be done
        sys.exit(f"bench.py: {error}")
