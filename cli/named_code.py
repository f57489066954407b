"""What is known to be impossible from the flags alone, judged before any process is started."""

from vcli.cli.build import ModelSettings
from vcli.runtime.core.overlap import check_async_scheduling
from vcli.runtime.executor.backends import get_executor_class
from vcli.topology import ParallelConfig
from vcli.topology.backend import choose_backend


def refuse_impossible_engine(settings: ModelSettings, parallel: ParallelConfig) -> None:
    """Judge the back end, the worker's extension and async scheduling.

    Imports a class that the user names in a process that ends again.

    Raises:
        ConfigError: one of them can't be, or not together.
        UnfitError: the system gives no process.
        StartupError: the class was not imported within the start's deadline.
    """
    backend, extension = choose_backend(parallel).value, settings.worker_extension_cls
    is_foreign = "." in backend
    can_overlap = is_foreign or get_executor_class(backend).can_overlap_steps
    if is_foreign or extension is not None:
        from vcli.runtime.executor.named_code import NamedCode, judge_named_code

        code = NamedCode(executor=backend if is_foreign else None, worker_extension=extension)
        judged = judge_named_code(code, deadline_s=settings.deadlines.start_s)
        can_overlap = can_overlap and judged
    check_async_scheduling(
        settings.scheduler.async_scheduling,
        num_stages=parallel.pipeline_parallel_size,
        backend=backend,
        backend_can_overlap=can_overlap,
    )
