"""One request inside the engine core: its tokens, how far it is computed, and why it ended."""

from enum import StrEnum

from vcli.runtime.errors import RequestError
from vcli.runtime.messages import NOT_SAMPLED, EngineRequest


class RequestStatus(StrEnum):
    """Where a request stands.

    waiting -> running -> finished, and running -> preempted -> running when blocks ran out.
    An abort leads from everywhere to finished.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended, as `EngineOutput.finish_reason` spells it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request:
    """Mutable state of one request; only the scheduler changes it.

    `number` is what the workers know it by. A request gets a new one each time it is admitted, so
    that a late result for an earlier admission can never be taken for a current one.

        token_ids   |<------- prompt ------->|<---- generated ---->|
        computed    |<- num_confirmed_tokens ->|<- in flight ->|
                    |<-------- num_computed_tokens ----------->|

    Where the workers keep what they sample, tokens may be computed that are not known here yet:
    `num_unknown_tokens` follow after `token_ids` once the steps in flight have sampled them.
    """

    __slots__ = (
        "block_hashes",
        "eos_token_ids",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_prompt_tokens",
        "num_shared_blocks",
        "num_unknown_tokens",
        "number",
        "request_id",
        "sampling",
        "status",
        "stop_token_ids",
        "token_ids",
        "unsent_token_id",
        "was_admitted",
        "was_output",
    )

    def __init__(self, request: EngineRequest, max_model_len: int) -> None:
        sampling = request.sampling
        num_prompt_tokens = len(request.prompt_token_ids)
        self.request_id = request.request_id
        self.sampling = sampling
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.eos_token_ids = frozenset(() if sampling.ignore_eos else request.eos_token_ids)
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.max_total_tokens = (
            max_model_len
            if sampling.max_tokens is None
            else min(max_model_len, num_prompt_tokens + sampling.max_tokens)
        )
        self.status = RequestStatus.WAITING
        self.number = -1
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_unknown_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache gave at the first admission."""
        self.block_hashes: list[bytes] = []
        """Hashes of the full blocks of `token_ids`, as many as were needed so far."""
        self.num_shared_blocks = 0
        """Leading blocks that were offered to the prefix cache since the last admission."""
        self.unsent_token_id = NOT_SAMPLED
        """The sampled token that the workers have not been told yet, as they will be told."""
        self.was_admitted = False
        self.was_output = False

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are neither computed nor in flight, and that the workers have.

        The last token that a request may have ends it, so nothing is computed from it.
        """
        num_tokens = len(self.token_ids) + self.num_unknown_tokens
        return min(num_tokens, self.max_total_tokens - 1) - self.num_computed_tokens

    @property
    def num_confirmed_tokens(self) -> int:
        """Tokens whose KV rows are known to be written."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    def rewind(self) -> None:
        """Forget all computed tokens; they are computed again after the next admission."""
        self.status = RequestStatus.PREEMPTED
        self.number = -1
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_unknown_tokens = 0
        self.num_shared_blocks = 0
        self.unsent_token_id = NOT_SAMPLED

    def append_token(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Take a sampled token; gives the reason if it ends the request, and the ending token."""
        self.token_ids.append(token_id)
        if self.num_generated_tokens >= self.sampling.min_tokens and (
            token_id in self.eos_token_ids or token_id in self.stop_token_ids
        ):
            return FinishReason.STOP, token_id
        if self.num_tokens >= self.max_total_tokens:
            return FinishReason.LENGTH, None
        return None, None


def verify_request(
    request: EngineRequest, *, max_model_len: int, max_chunk_tokens: int | None
) -> None:
    """Check that the engine can run the request at all.

    `max_chunk_tokens` is the longest prompt of a step, where prompts are not split; else None.

    Raises:
        RequestError: no prompt, a prompt that is too long, or a sampling option out of range.
    """
    request.sampling.verify()
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise RequestError("the prompt has no tokens", parameter="prompt")
    if num_tokens >= max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens; the context of {max_model_len} tokens leaves "
            "no room for an answer",
            parameter="prompt",
            hint="shorten the prompt, or raise --max-model-len",
        )
    if max_chunk_tokens is not None and num_tokens > max_chunk_tokens:
        raise RequestError(
            f"the prompt has {num_tokens} tokens; without chunked prefill a step takes "
            f"{max_chunk_tokens}",
            parameter="prompt",
            hint="raise --max-num-batched-tokens, or allow chunked prefill",
        )
