"""How many steps are in flight at once, and who knows the token that the next one starts from.

One stage, no overlap: 1 step. The next one is scheduled when the result is there.
Pipeline of P stages:  P steps of different requests, one in each stage; the scheduler sends tokens,
                       since the first stage doesn't see what the last one samples.
Async scheduling:      2 steps of the same requests. While one runs, the next one is scheduled and
                       sent; the workers keep what they sample, so the scheduler needs not know it.
"""

from dataclasses import dataclass

from vcli.runtime.config import EngineConfig
from vcli.topology.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverlap:
    """`num_steps` may be in flight; `keeps_samples` is async scheduling."""

    num_steps: int
    num_stages: int
    keeps_samples: bool
    reason: str


def decide_overlap(config: EngineConfig, *, backend_can_overlap: bool) -> StepOverlap:
    """The overlap for this configuration on a back end that can or can't take a step in advance.

    Raises:
        ConfigError: async scheduling was asked for, and is not possible.
    """
    num_stages = config.parallel.pipeline_parallel_size
    asked = config.scheduler.async_scheduling
    obstacle = check_async_scheduling(
        asked,
        num_stages=num_stages,
        backend=config.plan.backend.value,
        backend_can_overlap=backend_can_overlap,
    )
    if asked is False or obstacle:
        return StepOverlap(
            num_steps=num_stages,
            num_stages=num_stages,
            keeps_samples=False,
            reason=obstacle or "async scheduling is switched off",
        )
    return StepOverlap(
        num_steps=2,
        num_stages=1,
        keeps_samples=True,
        reason="asked for" if asked else "the next step is prepared while one runs",
    )


def check_async_scheduling(
    asked: bool | None, *, num_stages: int, backend: str, backend_can_overlap: bool
) -> str:
    """Why async scheduling is not possible; empty where it is.

    Raises:
        ConfigError: it is not, and was asked for.
    """
    obstacle = ""
    if num_stages > 1:
        obstacle = f"the {num_stages} pipeline stages overlap steps of different requests instead"
    elif not backend_can_overlap:
        obstacle = f"the back end {backend} takes one step at a time"
    if asked and obstacle:
        raise ConfigError(
            f"async scheduling is not possible: {obstacle}", hint="--no-async-scheduling"
        )
    return obstacle
