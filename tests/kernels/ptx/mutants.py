"""Programs with one synchronization less, which a test must find wrong.

A barrier is removed; a wait for asynchronous copies is removed, or lets one more group of them
go on. `role` says what a barrier or a wait is there for, as far as the program's text tells:

    "prologue"      a barrier: nothing was read since the one before, and up to the next one
                    copies are only started
    "drain"         it waits for all copies, after the loop that uses them, or follows that wait
    "drain by one"  that wait, if one group of copies may go on
    "other"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ptx.parse import Instruction, Program


def mutants(program: Program) -> Iterator[tuple[str, str, Program]]:
    """(name, role, program) of each."""
    for i, instruction in enumerate(program.instructions):
        is_wait = "wait_group" in instruction.modifiers
        if instruction.name == "bar" or is_wait:
            what = f"{instruction.text.split()[0]} at {i}"
            yield f"no {what}", role(program, i), without(program, i)
        if is_wait:
            num_open = int(instruction.operands[0], 0)
            later = instruction._replace(operands=[str(num_open + 1)])
            instructions = [*program.instructions[:i], later, *program.instructions[i + 1 :]]
            shorter = program._replace(instructions=instructions)
            by_one = " by one" if role(program, i) == "drain" else ""
            yield f"shorter {what}", role(program, i) + by_one, shorter


def without(program: Program, i: int) -> Program:
    """The program without instruction i."""
    return program._replace(
        instructions=program.instructions[:i] + program.instructions[i + 1 :],
        labels={name: at - (at > i) for name, at in program.labels.items()},
    )


def role(program: Program, i: int) -> str:
    """What a barrier or a wait is there for: see the module's list."""
    is_barrier = [x.name == "bar" for x in program.instructions]
    if is_barrier[i]:
        to_next = _follow(i, _successors(program), is_barrier.__getitem__)
        from_last = _follow(i, _predecessors(program), is_barrier.__getitem__)
        then, before = (
            [x for x in map(program.instructions.__getitem__, some) if _uses_shared(x)]
            for some in (to_next, from_last)
        )
        if all(x.name == "cp" for x in then) and all(x.name in ("cp", "st") for x in before):
            return "prologue"
    is_in_loop = i in _follow(i, _successors(program), lambda _: False)
    wait = program.instructions[i - 1 if is_barrier[i] else i]
    is_drain = "wait_group" in wait.modifiers and wait.operands == ["0"]
    return "drain" if is_drain and not is_in_loop else "other"


def _uses_shared(instruction: Instruction) -> bool:
    names = ("shared", "ldmatrix", "stmatrix")
    return any(name in (instruction.name, *instruction.modifiers) for name in names)


def _successors(program: Program) -> list[list[int]]:
    """The instructions that may follow each."""
    found = []
    for i, instruction in enumerate(program.instructions):
        is_last = instruction.name in ("ret", "bra") and instruction.guard is None
        following = [] if is_last else [i + 1]
        if instruction.name == "bra":
            following.append(program.labels[instruction.operands[0]])
        found.append([j for j in following if j < len(program.instructions)])
    return found


def _predecessors(program: Program) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in program.instructions]
    for i, following in enumerate(_successors(program)):
        for j in following:
            found[j].append(i)
    return found


def _follow(start: int, steps: list[list[int]], is_end: Callable[[int], bool]) -> set[int]:
    """What can be reached from start (itself only by a loop), not past where is_end."""
    seen: set[int] = set()
    ahead = list(steps[start])
    while ahead:
        i = ahead.pop()
        if i not in seen:
            seen.add(i)
            ahead += [] if is_end(i) else steps[i]
    return seen
