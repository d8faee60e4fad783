"""Token ids and text: streaming detokenization, stop strings, and mapping between vocabularies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import torch
from transformers import PreTrainedTokenizerBase

from engine.config import Limits
from engine.errors import VocabularyError
from engine.model.target import Target
from engine.model.tokenizer import decode, encode

REPLACEMENT = "\ufffd"
MAX_INCOMPLETE = 3
"""An incomplete character has at most three bytes, and decodes to at most as many U+FFFD."""
MAX_HELD = 16
"""Tokens held while their text is empty or ends with U+FFFD; of more, the stable part is shown."""


class Detokenizer:
    """Turns a stream of tokens into pieces of text that never change afterwards.

    A token that ends inside a multi-byte character yields ""; the token that completes the
    character yields all of it. Tokens are decoded in a window that begins before the new ones,
    because some tokenizers decode a token differently at the start of a text; so the window does
    not move over tokens without text.

    Args:
        hidden: tokens that yield no text, like special tokens.
        skip_special: whether special tokens yield none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        hidden: Sequence[int] = (),
        skip_special: bool = True,
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._hidden = frozenset(hidden)
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._prefix :])
        whole = not text.endswith(REPLACEMENT)
        piece = text[self._shown : None if whole else _sure_len(text)]
        if not (whole and piece) and len(self._ids) - self._read < MAX_HELD:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        text = self._decode(self._ids[self._prefix :])
        self._shown = len(text) if whole else _sure_len(text)
        return piece

    def flush(self) -> str:
        """The text still held back at the end; an incomplete character is U+FFFD."""
        return self._decode(self._ids[self._prefix :])[self._shown :]

    def _decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None or not ids:
            return "".join(f"⟨{i}⟩" for i in ids)
        return decode(self._tokenizer, ids, skip_special=self._skip_special)


def _sure_len(text: str) -> int:
    """Length of a text without the characters at its end that the next token may change."""
    tail = text[-MAX_INCOMPLETE:]
    return len(text) - (len(tail) - len(tail.rstrip(REPLACEMENT)))


def whole_text(
    tokenizer: PreTrainedTokenizerBase | None,
    token_ids: Sequence[int],
    limits: Limits | None = None,
) -> str:
    """Text of a finished output, cut before the first stop string, without stop tokens."""
    limits = limits or Limits()

    def whole(skip_special: bool) -> str:
        detokenizer = Detokenizer(
            tokenizer, hidden=limits.stop_token_ids, skip_special=skip_special
        )
        return "".join(detokenizer.push(i) for i in token_ids) + detokenizer.flush()

    text, (visible, special) = whole(True), _split_stops(tokenizer, limits.stop)
    cuts = [at for at in (text.find(s) for s in visible) if at >= 0]
    if special:
        names, full = _special_texts(tokenizer), whole(False)
        for at in (full.find(s) for s in special):
            if at >= 0:  # so much of the visible text belongs to the stop string
                cuts.append(len(text) - len(re.sub("|".join(map(re.escape, names)), "", full[at:])))
    return text[: min(cuts)] if cuts else text


def _special_texts(tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    added = {} if tokenizer is None else tokenizer.added_tokens_decoder
    return [token.content for token in added.values() if token.special and token.content]


def _split_stops(
    tokenizer: PreTrainedTokenizerBase | None, stops: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Stop strings of visible text, and those with a special token, which the text never shows."""
    names = _special_texts(tokenizer) if stops else []
    special = [stop for stop in stops if any(name in stop for name in names)]
    return [stop for stop in stops if stop not in special], special


class StopStrings:
    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, limits: Limits) -> None:
        visible, special = _split_stops(tokenizer, limits.stop)
        self._matchers = [
            _StopMatcher(Detokenizer(tokenizer, hidden=limits.stop_token_ids, **shown), strings)
            for strings, shown in ((visible, {}), (special, {"skip_special": False}))
            if strings
        ]

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Number of new tokens up to the one that completes a stop string; None without one."""
        for count, token_id in enumerate(token_ids, start=1):
            if any([matcher.push(token_id) for matcher in self._matchers]):
                return count
        return None


class _StopMatcher:
    def __init__(self, detokenizer: Detokenizer, strings: Sequence[str]) -> None:
        self._detokenizer, self._strings = detokenizer, strings
        self._longest = max(map(len, strings))
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Whether this token completes a stop string."""
        self._tail += self._detokenizer.push(token_id)
        is_complete = any(string in self._tail for string in self._strings)
        self._tail = self._tail[-(self._longest - 1) :] if self._longest > 1 else ""
        return is_complete


class Retokenizer:
    """Maps one model's tokens to another's of the same text; shared special tokens map directly.

    Special tokens, as in chat templates, are not text; those the other model lacks are dropped.

    Attributes:
        special: the first model's special tokens.
    """

    def __init__(self, source: Target, dest: Target) -> None:
        """Raises VocabularyError: a model has no tokenizer."""
        if source.tokenizer is None or dest.tokenizer is None:
            raise VocabularyError(
                f"{source.name} and {dest.name} need a tokenizer each to exchange text. Choose "
                "other models."
            )
        self._source, self._dest, self._num_ids = source.tokenizer, dest.tokenizer, dest.vocab_size
        ids, special = self._dest.get_vocab(), self._source.all_special_ids
        self.special = frozenset(special)
        names = zip(special, self._source.convert_ids_to_tokens(special), strict=True)
        shared = {token: ids[name] for token, name in names if name in ids}
        self._same = {token: other for token, other in shared.items() if other < self._num_ids}

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of the first model's tokens; an incomplete character is U+FFFD."""
        return decode(self._source, token_ids)

    def __call__(self, token_ids: Sequence[int]) -> list[int]:
        ids: list[int] = []
        for special, run in groupby(token_ids, key=self.special.__contains__):
            if special:
                ids += [self._same[token] for token in run if token in self._same]
            else:
                ids += self._encoded(self.text(list(run)))
        return ids

    def continued(
        self, before: Sequence[int], written: Sequence[int], context: Sequence[int]
    ) -> list[int]:
        """New text in the second model's tokens, as a continuation of `context`.

        Args:
            before: tokens that `written` follows; a leading space may only show after a token.
            context: the last tokens of the same text in the second model's vocabulary.
        """
        start = len(self.text(before))
        new = self.text([*before, *written])[start:].partition(REPLACEMENT)[0]
        whole = decode(self._dest, context)
        joined = self._encoded(whole + new)
        if joined[: len(context)] == list(context):
            return joined[len(context) :]
        # The last token would have been a longer one, but committed tokens stay.
        return self._encoded(new)

    def _encoded(self, text: str) -> list[int]:
        ids = encode(self._dest, text) if text else []
        return [token for token in ids if token < self._num_ids]


class SharedTokens:
    """The tokens of equal text in two vocabularies, and a translation of any text.

    Makes a drafter with another vocabulary lossless: its output is restricted to shared tokens,
    which are the target's tokens as well.
    Source: arXiv:2502.05202, Alg. 4 (token-level intersection).

    Attributes:
        ours: `(m,)` int64 ids of the shared tokens in the target's vocabulary.
        theirs: `(m,)` int64 ids of the same tokens in the drafter's.
    """

    def __init__(self, target: Target, drafter: Target) -> None:
        """Raises VocabularyError: a model has no tokenizer, or they share no token."""
        self._retokenize = Retokenizer(target, drafter)
        assert target.tokenizer is not None and drafter.tokenizer is not None
        ours, mark = target.tokenizer.get_vocab(), _space_mark(target.tokenizer)
        their_mark = _space_mark(drafter.tokenizer)
        self._their_id: dict[int, int] = {}
        # A tokenizer lists its vocabulary in varying order, which would make seeds meaningless.
        for token, their_id in sorted(drafter.tokenizer.get_vocab().items(), key=itemgetter(1)):
            same = mark + token[1:] if mark and their_mark and token[:1] == their_mark else token
            our_id = ours.get(same)
            if our_id is not None and our_id < target.vocab_size and their_id < drafter.vocab_size:
                self._their_id[our_id] = their_id
        if not self._their_id:
            raise VocabularyError(
                f"{drafter.name} shares no token with {target.name}. Choose another draft model."
            )
        self.ours = torch.tensor(list(self._their_id), device=drafter.device)
        self.theirs = torch.tensor(list(self._their_id.values()), device=drafter.device)

    def translate(self, token_ids: Sequence[int]) -> list[int]:
        """A text in the drafter's ids; a single shared token maps to itself."""
        if len(token_ids) == 1 and token_ids[0] in self._their_id:
            return [self._their_id[token_ids[0]]]
        return self._retokenize(token_ids)


def _space_mark(tokenizer: PreTrainedTokenizerBase) -> str:
    """The symbol for a leading space in its tokens: `Ġ`, `▁`; empty if there is none."""
    ids = encode(tokenizer, " ")
    return str(tokenizer.convert_ids_to_tokens(ids)[0])[:1] if len(ids) else ""


def common_vocabulary(target: Target, drafter: Target) -> int:
    """Number of leading ids that both models have logits for, once checked to be the same tokens.

    Models of one family pad their logits differently (Qwen2 has 151936 or 152064 for the same
    tokenizer), and chat variants add tokens in the padding: an added token of one model where the
    other has none is not a mismatch. Without tokenizers the numbers of logits must be equal.

    Raises VocabularyError: naming the first id that differs with both tokens, or both sizes.
    """
    if target.tokenizer is None or drafter.tokenizer is None:
        if target.vocab_size != drafter.vocab_size:
            raise VocabularyError(
                f"{target.name} has {target.vocab_size} logits, but {drafter.name} has "
                f"{drafter.vocab_size}, and without two tokenizers nothing says which tokens they "
                "share. Choose a drafter of the same family."
            )
        return target.vocab_size
    ours, theirs = (
        {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        for tokenizer in (target.tokenizer, drafter.tokenizer)
    )
    added = (target.tokenizer.added_tokens_decoder, drafter.tokenizer.added_tokens_decoder)
    for token_id in sorted(ours.keys() | theirs.keys()):
        our, their = ours.get(token_id), theirs.get(token_id)
        in_padding = (our is None or their is None) and any(token_id in tokens for tokens in added)
        if our != their and not in_padding:
            ours_is, theirs_is = ("no token" if t is None else repr(t) for t in (our, their))
            raise VocabularyError(
                f"{drafter.name} cannot draft for {target.name}: token id {token_id} is "
                f"{ours_is} for the target and {theirs_is} for the drafter. "
                "Choose a drafter with the target's vocabulary, or let this one draft by its text "
                f"{VocabularyError.BY_TEXT} or by shared tokens (vocabulary=intersection)."
            )
    return min(target.vocab_size, drafter.vocab_size)
