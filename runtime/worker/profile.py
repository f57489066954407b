"""Recording what one rank does with torch's profiler."""

from pathlib import Path

import torch

from vcli.topology.errors import ConfigError


class Profile:
    """At most one recording at a time; start and stop belong to one thread."""

    def __init__(self) -> None:
        self._profiler: torch.profiler.profile | None = None
        self._path = Path()

    def start(self, folder: Path, title: str, device: torch.device) -> None:
        """Begin; the trace will be `folder/title.json`.

        Raises:
            ConfigError: a recording runs already, or the folder can't be made.
        """
        if self._profiler is not None:
            raise ConfigError(f"{title} is recorded already", hint="stop_profile comes first")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"no folder {folder} for traces: {error}") from error
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._path = folder / f"{title}.json"
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def stop(self) -> Path:
        """End, and write the trace.

        Raises:
            ConfigError: nothing is recorded.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise ConfigError("nothing is recorded", hint="start_profile comes first")
        profiler.stop()
        profiler.export_chrome_trace(str(self._path))
        return self._path
