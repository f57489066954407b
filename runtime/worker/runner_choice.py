"""Which runner goes with a device."""

from vcli.runtime.config import EngineConfig
from vcli.runtime.distributed.parallel_state import ParallelContext
from vcli.runtime.models.decoder import CausalLM
from vcli.runtime.worker.device_runner import DeviceModelRunner
from vcli.runtime.worker.model_runner import ModelRunner


def make_runner(
    config: EngineConfig, *, model: CausalLM, context: ParallelContext, is_output: bool
) -> ModelRunner:
    """The runner of this rank."""
    if model.device.type != "cuda":
        return ModelRunner(config, model=model, context=context, is_output=is_output)
    from vcli.runtime.worker.step_ops_triton import TritonStepOps

    return DeviceModelRunner(
        config, model=model, context=context, is_output=is_output, ops=TritonStepOps()
    )
