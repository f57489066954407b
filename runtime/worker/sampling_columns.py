"""Sampling options of all rows as columns, so that a step reads them without a loop."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vcli.runtime.sampling_params import SamplingParams

FloatArray = npt.NDArray[np.float32]
Rows = npt.NDArray[np.intp]

#: multiplies a draw from [0, 1) so that a cumulative sum times it stays below the sum itself
_BELOW_ONE = 1.0 - 2.0**-52


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Options of the rows that sample in one step, in their order."""

    temperature: FloatArray
    top_k: npt.NDArray[np.int32]
    """0: every token."""
    top_p: FloatArray
    min_p: FloatArray
    repetition_penalty: FloatArray
    presence_penalty: FloatArray
    frequency_penalty: FloatArray
    num_logprobs: npt.NDArray[np.int32]
    """Most likely tokens to report besides the sampled one; -1: no log-probabilities."""
    min_tokens: npt.NDArray[np.int32]
    ending_token_ids: list[tuple[int, ...]]
    """Tokens that would end the request: not sampled before `min_tokens`."""

    @property
    def is_greedy(self) -> npt.NDArray[np.bool_]:
        """Rows that take the most likely token."""
        return np.equal(self.temperature, 0.0)

    @property
    def has_penalties(self) -> npt.NDArray[np.bool_]:
        """Rows whose earlier tokens change the logits."""
        scales = np.not_equal(self.repetition_penalty, 1.0)
        subtracts = np.logical_or(self.presence_penalty, self.frequency_penalty)
        return np.logical_or(scales, subtracts)


class SamplingColumns:
    """One entry for each row of the input batch."""

    def __init__(self, max_num_seqs: int) -> None:
        self._temperature: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k: npt.NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self._top_p: FloatArray = np.ones(max_num_seqs, dtype=np.float32)
        self._min_p: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self._repetition: FloatArray = np.ones(max_num_seqs, dtype=np.float32)
        self._presence: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self._frequency: FloatArray = np.zeros(max_num_seqs, dtype=np.float32)
        self._num_logprobs: npt.NDArray[np.int32] = np.full(max_num_seqs, -1, dtype=np.int32)
        self._min_tokens: npt.NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self._ending_token_ids: list[tuple[int, ...]] = [()] * max_num_seqs
        self._is_special: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        self._generators: dict[int, torch.Generator] = {}

    def set_row(
        self,
        row: int,
        sampling: SamplingParams,
        eos_token_ids: tuple[int, ...],
        *,
        num_generated: int,
    ) -> None:
        """Take the options of a request that has generated `num_generated` tokens before.

        The row is new or was cleared.
        """
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._repetition[row] = sampling.repetition_penalty
        self._presence[row] = sampling.presence_penalty
        self._frequency[row] = sampling.frequency_penalty
        self._num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self._min_tokens[row] = sampling.min_tokens
        self._is_special[row] = _is_special(sampling)
        ending = sampling.stop_token_ids
        if not sampling.ignore_eos:
            ending += eos_token_ids
        self._ending_token_ids[row] = ending
        if sampling.seed is not None and not sampling.is_greedy:
            generator = torch.Generator()
            generator.manual_seed(sampling.seed)
            # A request that was preempted goes on with the draws it would have had.
            if num_generated > 0:
                torch.rand(num_generated, generator=generator, dtype=torch.float64)
            self._generators[row] = generator

    def clear_row(self, row: int) -> None:
        """Forget what belongs to the request of `row`."""
        self._generators.pop(row, None)
        self._ending_token_ids[row] = ()

    def temperature_of(self, rows: npt.NDArray[np.integer[Any]]) -> FloatArray:
        """The temperatures of `rows`."""
        chosen: FloatArray = self._temperature[rows]
        return chosen

    def are_plain(self, rows: Rows) -> bool:
        """Whether `rows` need nothing but their logits and temperatures to be sampled."""
        return not (self._is_special[rows].any())

    def select(self, rows: Rows) -> SamplingRows:
        """The options of `rows`."""
        return SamplingRows(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            repetition_penalty=self._repetition[rows],
            presence_penalty=self._presence[rows],
            frequency_penalty=self._frequency[rows],
            num_logprobs=self._num_logprobs[rows],
            min_tokens=self._min_tokens[rows],
            ending_token_ids=[self._ending_token_ids[row] for row in rows],
        )

    def draw(self, rows: Rows, shared: torch.Generator) -> torch.Tensor:
        """A number from [0, 1) for each row, float64 on the CPU, one draw for each.

        A row with a seed draws from its own generator, so its numbers depend on nothing but the
        seed and how many tokens it has generated; the others draw from `shared`.
        """
        drawn = torch.rand(len(rows), generator=shared, dtype=torch.float64)
        if self._generators:
            for index, row in enumerate(rows):
                generator = self._generators.get(int(row))
                if generator is not None:
                    drawn[index] = torch.rand((), generator=generator, dtype=torch.float64)
        return drawn * _BELOW_ONE


def _is_special(sampling: SamplingParams) -> bool:
    limits = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    is_penalised = (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
    has_own_draws = sampling.seed is not None
    return (
        is_penalised
        or sampling.logprobs is not None
        or sampling.min_tokens > 0
        or (not sampling.is_greedy and (limits or has_own_draws))
    )
