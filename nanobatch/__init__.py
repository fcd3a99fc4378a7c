"""nanobatch: a small, complete inference engine that teaches dynamic (continuous) batching.

Every public name can be had from here. They are loaded when first asked for, so that
`from nanobatch import Scheduler` works, and works fast, where torch is not installed.
"""

import importlib

_HOMES = {
    "config": "EngineConfig",
    "models.config": "ModelConfig",
    "request": "SamplingParams Request RequestOutput RequestMetrics RequestStatus",
    "block_allocator": "BlockAllocator OutOfBlocks",
    "plan": "SchedulerOutput ScheduledRequest StepResult",
    "scheduler": "Scheduler",
    "engine": "LLMEngine",
    "policies.ordering": "FCFS SJF Priority",
    "policies.lengths": "LearnedLengths",
    "simulation.replica": "SimulationResult SimulatedRunner VirtualClock",
    "simulation.simulator": "simulate simulate_replicas ReplicasResult",
    "simulation.router": "RoundRobin LeastLoaded PrefixAware",
    "batch": "Batch",
    "attention": "paged_attention",
    "model_runner": "ModelRunner",
    "llm": "LLM",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = list(_HOME_OF)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nanobatch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nanobatch.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
