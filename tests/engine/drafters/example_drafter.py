"""A drafter in thirty lines: after a pair of tokens, draft what followed it before.

python app.py generate "…" --method User_Provided --drafter example_drafter:PairDrafter
"""

from collections.abc import Sequence


class PairDrafter:
    """Remembers where every pair of tokens was seen last, and the place before that."""

    def __init__(self, target):  # the loaded target, should you need its tokenizer or weights
        self.seen: dict[tuple[int, ...], list[int]] = {}
        self.text: list[int] = []

    def draft(self, token_ids: Sequence[int], max_draft_len: int) -> list[list[int]]:
        self.read(token_ids)
        places = self.seen.get(tuple(token_ids[-2:]), [])
        return [list(token_ids[at : at + max_draft_len]) for at in reversed(places)]

    def read(self, token_ids: Sequence[int]) -> None:
        """Note what is new; start over where this is another text."""
        if list(token_ids[: len(self.text)]) != self.text:
            self.seen, self.text = {}, []
        for at in range(max(2, len(self.text)), len(token_ids)):
            pair = (token_ids[at - 2], token_ids[at - 1])
            self.seen[pair] = [*self.seen.get(pair, []), at][-2:]
        self.text = list(token_ids)
