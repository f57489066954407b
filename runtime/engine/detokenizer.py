"""Token ids to text while they arrive, and the search for stop strings in it.

Text is decoded in a short window over the last tokens, so the cost of a token does not grow with
the length of the request:

    token ids   ... | context | pending |
                    ^ what was decoded last, so that joins (spaces) come out right
                              ^ not emitted yet: empty, or the beginning of a character

A window whose text ends in U+FFFD may end inside a character; it waits for more tokens. The
tokenizers package has a `DecodeStream` of its own, but that never gives up waiting in a run of
invalid bytes (each step decodes the whole run again), raises on some of them, and has no way to
flush what it holds at the end.
"""

from collections.abc import Sequence

import tokenizers

from vcli.runtime.engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 8
_LONGEST_PREFIX = 3  # tokens of at least one byte each, of a character of at most four bytes
_NUM_CONTEXT = 6


class IncrementalDetokenizer:
    """Text of one request. `add` gives what became certain, `flush` the rest.

    The joined text equals decoding all tokens at once. One exception: a byte-fallback tokenizer
    (Llama 2's) decodes a whole run of byte tokens to U+FFFD when one of them is invalid, where
    this has emitted the valid characters before it already.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._backend: tokenizers.Tokenizer = tokenizer.backend
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        context = [t for t in prompt_token_ids[-_NUM_CONTEXT:] if t not in self._skipped]
        text = self._decode(context)
        if text.endswith(_REPLACEMENT):  # the prompt ends inside a character
            context, text = [], ""
        self._window = context
        self._num_context = len(context)
        self._context_text = text

    @property
    def num_pending(self) -> int:
        """Tokens whose text was not given yet."""
        return len(self._window) - self._num_context

    def skips(self, token_id: int) -> bool:
        """Whether the token has no text here."""
        return token_id in self._skipped

    def add(self, token_id: int) -> str:
        """Take one token; the text that is certain now, empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            return self._advance(text)
        if self.num_pending <= _MAX_PENDING:
            return ""
        return self._give_up_on_oldest()

    def flush(self) -> str:
        """The rest at the end of the request; U+FFFD where a character never became complete."""
        if not self.num_pending:
            return ""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        delta = self._new_part(text, self._window)
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window)
        return delta

    def _new_part(self, text: str, window: list[int]) -> str:
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # New tokens changed the decoding of old ones (see the class): what is out is out.
        return self._decode(window[self._num_context :])

    def _give_up_on_oldest(self) -> str:
        """Emit all but the last tokens of an invalid run, cut between two characters.

        At a cut where both parts decode to the same text as the whole, no character spans it.
        """
        pending = self._window[self._num_context :]
        whole = self._decode(pending)
        for kept in range(_LONGEST_PREFIX, 0, -1):
            head, tail = pending[:-kept], pending[-kept:]
            if self._decode(head) + self._decode(tail) == whole:
                delta = self._new_part(self._decode(self._window[:-kept]), self._window[:-kept])
                self._window, self._num_context, self._context_text = tail, 0, ""
                return delta
        return self._advance(self._decode(self._window))

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False) if token_ids else ""


class StopStringFilter:
    """Cuts text before the first stop string, and holds back what may be the start of one.

    The stop string that is complete first wins, so the result does not depend on how the text is
    cut into pieces.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Take new text; the text that can be shown. Sets `matched` when a stop string is found."""
        if not self._stop or self.matched is not None:
            return text if self.matched is None else ""
        self._held += text
        found = self._first_match()
        if found is not None:
            end, start, self.matched = found
            shown, self._held = self._held[: end if self._include_in_output else start], ""
            return shown
        cut = len(self._held) - self._possible_start_length()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def pass_unsearched(self, text: str) -> str:
        """Show `text` without a search (before `min_tokens`)."""
        shown, self._held = self._held + text, ""
        return shown

    def flush(self) -> str:
        """What is held back, when the request ends without a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self) -> tuple[int, int, str] | None:
        matches = []
        for stop in self._stop:
            start = self._held.find(stop)
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches, default=None)

    def _possible_start_length(self) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if stop.startswith(self._held[-length:]):
                    longest = length
                    break
        return longest
