"""The CPU's backend, in C: compiled where it first runs. attention.choose_backend loads it."""

from nanobatch.extensions.cpu.backend import CBackend

__all__ = ["CBackend"]
