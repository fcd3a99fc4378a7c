"""PTX as a list of instructions.

@%p5 ld.global.v2.b32 { %r68, %r69 }, [ %rd19 + 8 ];

name "ld", modifiers ("global", "v2", "b32"), guard "%p5"
operands [["%r68", "%r69"], Address("%rd19", 8)]
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Address(NamedTuple):
    """[base + offset]; base: a register or the name of a symbol."""

    base: str
    offset: int


class Instruction(NamedTuple):
    """One instruction; a guard lets only those threads take part where it is true."""

    name: str
    modifiers: tuple[str, ...]
    operands: list[str | list[str] | Address]
    guard: str | None
    is_guard_negated: bool
    text: str

    @property
    def kind(self) -> str:
        """The type that it works on: its last modifier."""
        return self.modifiers[-1]


class Program(NamedTuple):
    """A kernel. parameters: their names in the PTX, in the order of the arguments."""

    instructions: list[Instruction]
    labels: dict[str, int]  # the instruction that each stands before
    parameters: list[str]
    num_threads: int


def parse(ptx: str) -> Program:
    """Parse a file with one kernel."""
    head, _, body = ptx[ptx.index(".visible .entry") :].partition("{")
    body = body[: body.index("$L__func_end")]
    body = re.sub(r"//[^\n]*|^\s*\.(?:loc|pragma)\b[^\n]*$", "", body, flags=re.M)
    # Each statement and label on a line of its own. A brace that begins a line is a scope's.
    body = re.sub(r"^\s*[{}]", "", body.replace(";", "\n"), flags=re.M)
    body = re.sub(r"^\s*([$\w]+:)", r"\1\n", body, flags=re.M)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in map(str.strip, body.splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line and not line.startswith("."):
            instructions.append(parse_instruction(line))
    parameters = re.findall(r"(\w+_param_\d+)", head)
    return Program(instructions, labels, parameters, int(re.search(r"reqntid (\d+)", head)[1]))


def parse_instruction(text: str) -> Instruction:
    """Parse one instruction without its semicolon."""
    guard, negation, code, rest = re.fullmatch(
        r"(?:@(!?)(\S+)\s+)?([\w.:]+)\s*(.*)", text, re.S
    ).group(2, 1, 3, 4)
    name, *modifiers = code.split(".")
    operands = [_operand(x) for x in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,{}\[\]]+", rest)]
    return Instruction(name, tuple(modifiers), operands, guard, negation == "!", text)


def _operand(text: str) -> str | list[str] | Address:
    if text.startswith("{"):
        return [x.strip() for x in text[1:-1].split(",")]
    if text.startswith("["):
        base, _, offset = text[1:-1].partition("+")
        return Address(base.strip(), int(offset or "0", 0))
    return text
