"""Whether two models mean the same by a token id, so that one may draft for the other."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from engine.errors import VocabularyError
from engine.model.target import Target


def common_vocabulary(target: Target, drafter: Target) -> int:
    """How many leading ids both models have logits for, after checking that they agree on them.

    Models of one family pad their logits differently (Qwen2 has 151936 or 152064 for the same
    tokenizer), and chat variants add tokens in the padding: an added token of one model where the
    other has nothing is no mismatch. Without tokenizers the numbers of logits must be equal.

    Raises:
        VocabularyError: naming the first id that differs and both its tokens, or both sizes.
    """
    if target.tokenizer is None or drafter.tokenizer is None:
        if target.vocab_size != drafter.vocab_size:
            raise VocabularyError(
                f"{target.name} has {target.vocab_size} logits, but {drafter.name} has "
                f"{drafter.vocab_size}, and without two tokenizers nothing says which tokens they "
                "share. Choose a drafter of the same family."
            )
        return target.vocab_size
    ours, theirs = _tokens(target.tokenizer), _tokens(drafter.tokenizer)
    added = (target.tokenizer.added_tokens_decoder, drafter.tokenizer.added_tokens_decoder)
    for token_id in sorted(ours.keys() | theirs.keys()):
        our, their = ours.get(token_id), theirs.get(token_id)
        in_padding = (our is None or their is None) and any(token_id in known for known in added)
        if our != their and not in_padding:
            raise VocabularyError(
                f"{drafter.name} cannot draft for {target.name}: token id {token_id} is "
                f"{_shown(our)} for the target and {_shown(their)} for the drafter. "
                "Choose a drafter with the target's vocabulary."
            )
    return min(target.vocab_size, drafter.vocab_size)


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
