"""What `python bench.py` runs: a subcommand for each thing to measure, the ladder by default.

Each subcommand is a module of this folder:

    add_arguments(parser)     its flags
    check_arguments(args)     refuses what cannot be, if flags.check_common does not
    run_command(args)         measures and prints; returns the report, with a "failure" (a
                              text) if what was measured is wrong
    draw(found, args, figures)    yields the figures of --plot, if it has that flag

Only the module that was asked for is imported: `simulate` and `host` run without torch.

Exit codes: 0; 1 if it cannot be measured or is wrong; 2 for flags that are refused. What is
wrong has been printed and saved by then.
"""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from types import ModuleType

from nanobatch.bench import flags, report

COMMANDS = {  # by name: the module, and a line of help
    "ladder": ("ladder", "five ways of batching on the same requests (the default)"),
    "simulate": ("simulated", "the real scheduler on a simulated GPU: MODEL@GPU"),
    "compare": ("other_engines", "other engines on the same requests, in turns"),
    "kernels": ("kernels", "each kernel against bandwidth and matrix rate"),
    "host": ("host", "what the scheduler costs between two steps"),
    "check": ("fuzz", "random configurations, for so many SECONDS: is it right here?"),
    "speculative": ("speculative", "what drafts gain, on two kinds of text"),
    "gpu": ("gpu.command", "all that one visit to a GPU should bring home"),
}
DEFAULT = "ladder"


def main(
    argv: Sequence[str] | None = None, load_figures: Callable[[], ModuleType] | None = None
) -> dict:
    """Run a command line, and write its report if --save-json says so. Returns the report.

    Args:
        argv: without the program's name; None: those of this process.
        load_figures: imports what draws for --plot (nanobatch.viz, which lies above bench/).

    Raises:
        ValueError, OSError: it cannot be measured.
        SystemExit: flags are refused; or what was measured is wrong.
    """
    name, argv = _split(argv)
    module = _import(name)
    parser, args = _parse(name, module, argv)
    figures = None
    if getattr(args, "plot", None) is not None:
        try:  # found out now, not after the measurement
            figures = load_figures()
        except ImportError as error:
            parser.error(f"--plot is {args.plot}; it needs matplotlib: {error}")
    result = module.run_command(args) | {"args": report.args_of(args)}
    if getattr(args, "save_json", None) is not None:
        report.save(result, args.save_json)
    if figures is not None and args.plot is not None:  # None: another rank draws
        for file, figure in module.draw(result, args, figures):
            report.save_figure(figure, file)
    if result.get("failure") is not None:
        sys.exit(result["failure"])
    return report.finite(result)


def parse_args(argv: Sequence[str] | None = None) -> Namespace:
    """The checked flags of a command line; exits with 2 where they are refused."""
    name, argv = _split(argv)
    return _parse(name, _import(name), argv)[1]


def _split(argv: Sequence[str] | None) -> tuple[str, list[str]]:
    """The subcommand and its flags; help and unknown names end here."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["-h"], ["--help"]):
        _top_parser().parse_args(argv)
    is_named = bool(argv) and not argv[0].startswith("-")
    name = argv.pop(0) if is_named else DEFAULT
    if name not in COMMANDS:
        _top_parser().error(f"there is no {name!r}; choose from {', '.join(COMMANDS)}")
    return name, argv


def _parse(
    name: str, module: ModuleType, argv: Sequence[str]
) -> tuple[ArgumentParser, Namespace]:
    parser = ArgumentParser(
        prog=f"bench.py {name}",
        description=module.__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,  # flags.given_names reads whole names
    )
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    args.given = flags.given_names(argv)
    try:
        flags.check_common(args)
        if hasattr(module, "check_arguments"):
            module.check_arguments(args)
    except ValueError as error:
        parser.error(str(error))
    return parser, args


def _top_parser() -> ArgumentParser:
    commands = "\n".join(f"  {name:13}{line}" for name, (_, line) in COMMANDS.items())
    return ArgumentParser(
        prog="bench.py",
        usage="bench.py [COMMAND] [FLAGS]",
        description=f"{commands}\n\nThe flags of each: bench.py COMMAND --help",
        formatter_class=RawDescriptionHelpFormatter,
    )


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"nanobatch.bench.{COMMANDS[name][0]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("nanobatch"):
            raise
        sys.exit(
            f"bench.py {name} needs {error.name}, which is not installed; "
            "simulate and host need only Python"
        )
