"""A worker extension that keeps the logits of every row that samples."""

import torch

from vcli.runtime.worker.device_runner import DeviceModelRunner


class LogitRecorder:
    """Methods for a real worker, called through `collective_rpc`."""

    def record_logits(self) -> None:
        """Keep what the model computes from here on."""
        runner = self._runner
        finish, self.recorded = runner._finish, []
        has_parts = isinstance(runner, DeviceModelRunner)

        def recording(sampling):
            logits = sampling.logits_NV
            if logits is not None:
                # On a device each rank has its part of the vocabulary; all ranks are here.
                whole = runner.model.lm_head.whole_logits(logits) if has_parts else logits
                self.recorded.append(whole.float().cpu().clone())
            return finish(sampling)

        runner._finish = recording

    def recorded_logits(self) -> list[list[float]]:
        """One row per step, (steps, vocabulary); empty where this rank computes none."""
        return torch.cat(self.recorded).tolist() if self.recorded else []

    def num_graphs(self) -> int:
        """CUDA graphs that this rank has."""
        graphs = getattr(self._runner, "_graphs", None)
        return 0 if graphs is None else len(graphs._captured)
