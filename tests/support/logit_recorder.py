"""A worker extension that keeps the logits of every row that samples."""

import torch


class LogitRecorder:
    """Methods for a real worker, called through `collective_rpc`."""

    def record_logits(self) -> None:
        """Keep what the model computes from here on."""
        model = self._runner.model
        compute, self.recorded = model.compute_logits, []

        def recording(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(hidden)
            self.recorded.append(logits.float().clone())
            return logits

        model.compute_logits = recording

    def recorded_logits(self) -> list[list[float]]:
        """One row per step, (steps, vocabulary); empty where this rank computes none."""
        return torch.cat(self.recorded).tolist() if self.recorded else []
