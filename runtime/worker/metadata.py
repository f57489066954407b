"""From the rows of a step to the tensors that the model reads. No loop over tokens.

Shapes: T tokens of the step, R requests, B blocks.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vcli.runtime.layers.attention import ForwardMetadata
from vcli.runtime.worker.input_batch import InputBatch, IntArray, ScheduledRows
from vcli.runtime.worker.transfer import to_tensor

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What the model reads in one step, as arrays on the host."""

    input_ids_T: LongArray
    positions_T: LongArray
    slot_mapping_T: LongArray
    """Where the keys and values of each token go: block * block_size + offset."""
    query_start_loc: IntArray
    """(R + 1,) first token of each request, then T."""
    seq_lens_R: IntArray
    block_tables_RB: IntArray
    """Padded with 0."""
    block_size: int

    def to_device(self, device: torch.device) -> "DeviceInputs":
        """The same as tensors on `device`; on a CPU they share the arrays' memory."""
        query_lens = np.diff(self.query_start_loc)
        return DeviceInputs(
            input_ids_T=to_tensor(self.input_ids_T, device),
            positions_T=to_tensor(self.positions_T, device),
            metadata=ForwardMetadata(
                num_tokens=len(self.input_ids_T),
                num_requests=len(self.seq_lens_R),
                query_start_loc=to_tensor(self.query_start_loc, device),
                seq_lens=to_tensor(self.seq_lens_R, device),
                block_tables=to_tensor(self.block_tables_RB, device),
                slot_mapping=to_tensor(self.slot_mapping_T, device),
                block_size=self.block_size,
                max_query_len=int(query_lens.max()),
                max_seq_len=int(self.seq_lens_R.max()),
                query_lens_cpu=query_lens.tolist(),
                seq_lens_cpu=self.seq_lens_R.tolist(),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInputs:
    """What the model is called with."""

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    metadata: ForwardMetadata


def build_step_inputs(batch: InputBatch, step: ScheduledRows) -> StepInputs:
    """The inputs of a step with at least one token."""
    num_scheduled = step.num_scheduled
    query_start_loc: IntArray = np.zeros(step.num_requests + 1, dtype=np.int32)
    np.cumsum(num_scheduled, out=query_start_loc[1:])
    # Everything per token is its request's value, repeated, plus its place among the request's.
    first_position = step.num_computed - query_start_loc[:-1]
    positions: LongArray = np.arange(query_start_loc[-1], dtype=np.int64)
    positions += np.repeat(first_position, num_scheduled)
    token_rows = np.repeat(step.rows, num_scheduled)
    block_size = batch.block_size
    seq_lens = step.seq_lens
    max_blocks = -(-int(seq_lens.max()) // block_size)
    # Cells behind a row's last block may hold another, earlier request's ids: they become 0.
    block_tables = batch.block_table[step.rows, :max_blocks]
    block_tables[np.arange(max_blocks) >= batch.num_blocks[step.rows, None]] = 0
    block_indices, offsets = np.divmod(positions, block_size)
    blocks = batch.block_table[token_rows, block_indices]
    return StepInputs(
        input_ids_T=batch.token_ids[token_rows, positions].astype(np.int64),
        positions_T=positions,
        slot_mapping_T=blocks.astype(np.int64) * block_size + offsets,
        query_start_loc=query_start_loc,
        seq_lens_R=seq_lens,
        block_tables_RB=block_tables,
        block_size=block_size,
    )


def build_dummy_inputs(query_lens: list[int], *, scratch_block: int, block_size: int) -> StepInputs:
    """Inputs of made-up new requests that write only into `scratch_block`, whatever their length.

    Their tokens overwrite each other there, so what the model gives for them means nothing.
    """
    lens: IntArray = np.asarray(query_lens, dtype=np.int32)
    query_start_loc: IntArray = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=query_start_loc[1:])
    positions: LongArray = np.arange(query_start_loc[-1], dtype=np.int64)
    positions -= np.repeat(query_start_loc[:-1], lens)
    max_blocks = -(-int(lens.max()) // block_size)
    return StepInputs(
        input_ids_T=np.zeros(len(positions), dtype=np.int64),
        positions_T=positions,
        slot_mapping_T=scratch_block * block_size + positions % block_size,
        query_start_loc=query_start_loc,
        seq_lens_R=lens,
        block_tables_RB=np.full((len(lens), max_blocks), scratch_block, dtype=np.int32),
        block_size=block_size,
    )
