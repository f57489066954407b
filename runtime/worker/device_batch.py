"""What the device itself keeps of the input batch, so that a step of decodes sends it little.

A row of each tensor belongs to the same row of the input batch. The one behind them all belongs to
nobody: padding of a graph's batch reads and writes there, and in the scratch block.
"""

import numpy as np
import torch

from vcli.runtime.worker.input_batch import InputBatch, IntArray, NewBlocks, ScheduledRows
from vcli.runtime.worker.transfer import to_tensor

#: rows of `decode_columns`
NUM_COLUMNS = 5
NOTHING = -1


class DeviceBatch:
    """Block tables, last tokens and temperatures of all rows, on the device."""

    def __init__(
        self, *, max_num_seqs: int, max_blocks: int, scratch_block: int, device: torch.device
    ) -> None:
        self.scratch_row = max_num_seqs
        self._device = device
        num_rows = max_num_seqs + 1
        self.block_tables = torch.full(
            (num_rows, max_blocks), scratch_block, dtype=torch.int32, device=device
        )
        self.last_token = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)

    def apply(self, batch: InputBatch, *, new_blocks: list[NewBlocks]) -> None:
        """Take over new rows of `batch`, and these blocks."""
        if new_blocks:
            width = self.block_tables.shape[1]
            cells = np.concatenate(
                [
                    np.arange(len(new.block_ids), dtype=np.int64) + (new.row * width + new.start)
                    for new in new_blocks
                ]
            )
            block_ids = np.asarray([i for new in new_blocks for i in new.block_ids], np.int32)
            self.block_tables.view(-1).index_copy_(
                0, to_tensor(cells, self._device), to_tensor(block_ids, self._device)
            )
        if batch.new_rows:
            rows = np.asarray(batch.new_rows, dtype=np.int64)
            self.temperature.index_copy_(
                0,
                to_tensor(rows, self._device),
                to_tensor(batch.sampling.temperature_of(rows), self._device),
            )


def decode_columns(batch: InputBatch, step: ScheduledRows, out: IntArray) -> None:
    """Fill `out` (5, R): row, length, token, new block's column and id.

    For a step in which every request computes one token and gets at most one block. A token of
    `NOTHING` is the row's last one on the device. Rows behind the step's requests stay as they are.
    """
    count = step.num_requests
    out[0, :count] = step.rows
    lengths = step.seq_lens
    out[1, :count] = lengths
    tokens = batch.token_ids[step.rows, lengths - 1]
    out[2, :count] = np.where(step.is_own, NOTHING, tokens)
    out[3, :count] = NOTHING
    if batch.new_blocks:
        place_of_row = {row: place for place, row in enumerate(step.rows.tolist())}
        for new in batch.new_blocks:
            place = place_of_row[new.row]
            out[3, place] = new.start
            out[4, place] = new.block_ids[0]


def fits_decode_columns(batch: InputBatch, step: ScheduledRows) -> bool:
    """Whether `decode_columns` can say all that the device has to know of this step.

    Not if it samples nothing: nobody waits for such a step, and its columns stand in a buffer that
    is written again a few steps later.
    """
    return (
        not batch.new_rows
        and bool(step.samples.any())
        and bool((step.num_scheduled == 1).all())
        and all(len(new.block_ids) == 1 for new in batch.new_blocks)
    )
