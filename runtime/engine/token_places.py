"""Where in the text of a request each token begins, for its log-probabilities.

A token is placed when the detokenizer has given its text, and shown when the text before it is:

    token -> unplaced (inside a character) -> placed (its text may be cut by a stop string) -> shown
"""

from collections import deque
from collections.abc import Callable, Sequence

from vcli.runtime.messages import TokenLogprobs


class PlacedTokens:
    """The tokens of one request in their order; offsets are characters of the shown text."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._unplaced: list[tuple[TokenLogprobs, bytes | None]] = []
        self._placed: deque[tuple[TokenLogprobs, int]] = deque()
        self._length = 0

    def add(self, entry: TokenLogprobs, *, is_silent: bool) -> None:
        """Take a token; a silent one has no text (the end-of-text token)."""
        data = None if is_silent else self._token_bytes(entry.token_id)
        self._unplaced.append((entry, data))

    def place(self, text: str, *, num_pending: int) -> None:
        """`text` is that of all tokens but the last `num_pending` that are not silent."""
        cut = len(self._unplaced)
        while num_pending and cut:
            cut -= 1
            num_pending -= self._unplaced[cut][1] is not None
        ready, self._unplaced = self._unplaced[:cut], self._unplaced[cut:]
        starts = _starts([data or b"" for _, data in ready], text)
        for (entry, _), start in zip(ready, starts, strict=True):
            self._placed.append((entry, self._length + start))
        self._length += len(text)

    def shown(self, length: int, *, is_over: bool) -> tuple[list[TokenLogprobs], list[int]]:
        """The next tokens and their offsets, once `length` characters are shown.

        When the request is over these are all that are left; those that a stop string cut off
        stand at the end of the text.
        """
        if is_over:
            self.place("", num_pending=0)
        entries, offsets = [], []
        while self._placed and (is_over or self._placed[0][1] <= length):
            entry, offset = self._placed.popleft()
            entries.append(entry)
            offsets.append(min(offset, length))
        return entries, offsets


def _starts(tokens: Sequence[bytes], text: str) -> list[int]:
    """Where the character of each token's first byte stands in their joined `text`."""
    joined = b"".join(tokens)
    # A byte-fallback tokenizer shows a broken run of bytes in a way of its own.
    if len(tokens) < 2 or joined.decode(errors="replace") != text:
        return [0] * len(tokens)
    starts, begun = [], 0
    for data in tokens:
        shown = len(joined[: begun + 1].decode(errors="replace"))
        starts.append(shown - (begun < len(joined)))
        begun += len(data)
    return starts
