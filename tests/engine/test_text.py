"""Text as it streams: pieces never change, multi-byte characters come out whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.config import Limits
from engine.model.labels import TokenLabels
from engine.model.random_weights import byte_tokenizer
from engine.model.text import REPLACEMENT, Detokenizer, StopStrings, whole_text
from tests.models import tiny_tokenizer


def pieces_of(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tiny_tokenizer())
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 255), max_size=80))
def test_any_bytes_stream_to_what_they_decode_to_at_once(token_ids: list[int]) -> None:
    assert "".join(pieces_of(token_ids)) == tiny_tokenizer().decode(token_ids)


@given(st.text() | st.sampled_from(["👩‍👩‍👧‍👦 family", "日本語のテキスト", "\n\t ", REPLACEMENT]))
def test_any_text_streams_to_itself(text: str) -> None:
    assert "".join(pieces_of(tiny_tokenizer().encode(text))) == text


def test_long_garbage_before_a_character_does_not_break_it() -> None:
    tokenizer = tiny_tokenizer()
    continuation = tokenizer.encode("é")[1]
    for count in range(60):
        token_ids = [continuation] * count + tokenizer.encode("🙂!")
        assert "".join(pieces_of(token_ids)) == REPLACEMENT * count + "🙂!"


def test_flush_shows_an_incomplete_character() -> None:
    assert pieces_of(tiny_tokenizer().encode("a🙂")[:-1]) == ["a", "", "", "", REPLACEMENT]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Byte fallback and a leading-space rule, as in Llama 2's tokenizer."""
    vocab = {"<unk>": 0, "▁a": 1, "b": 2, "▁": 3, **{f"<0x{i:02X}>": 4 + i for i in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_byte_fallback_tokens_and_leading_spaces_stream_whole() -> None:
    tokenizer = sentencepiece_like()
    ids = [1, 1, *(4 + byte for byte in "🙂é".encode()), 2, 1]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) == "a a🙂éb a" == tokenizer.decode(ids)
    assert pieces[0] == "a" and pieces[1] == " a"
    assert REPLACEMENT not in "".join(pieces)


def test_the_space_after_a_special_token_is_kept() -> None:
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    ids = [1, tokenizer.eos_token_id, tokenizer.eos_token_id, 1, 2]
    assert whole_text(tokenizer, ids) == "a ab" == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_part_of_a_character_is_labelled_by_its_bytes() -> None:
    tokenizer = byte_tokenizer()  # one of its own: tokens are added
    lead, rest, x = map(TokenLabels(tokenizer), tokenizer.encode("éx"))
    assert (lead, rest, x) == ("1 of 2 bytes", "byte A9", "x")
    assert TokenLabels(tokenizer)(9999) == TokenLabels(None)(9999) == "⟨9999⟩"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.add_tokens(["<b>"])
    added: Any = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<b>"])
    assert [*map(TokenLabels(tokenizer), added)] == ["⟨|im_end|⟩", "<b>"]


@pytest.mark.parametrize(
    "tokenizer", [tiny_tokenizer(), sentencepiece_like()], ids="bpe sp".split()
)
def test_a_part_of_a_character_names_the_character_of_its_path(tokenizer: Any) -> None:
    """🙂: one token before the step, its root, a draft, the target's own; beside it, ü."""
    one, two, three, four = byte_tokens(tokenizer, "🙂".encode())
    lead, rest = byte_tokens(tokenizer, "ü".encode())
    step: Any = SimpleNamespace(tokens=(two, lead, rest, three), parents=(-1, 0, 1, 0))
    step.accepted, step.bonus = (3,), four
    labels = TokenLabels(tokenizer).of_step(step, [7, one, two])
    part, beside = "1 of 4 bytes of 🙂", "1 of 2 bytes of ü"
    assert labels == [part, beside, beside, part, part]
    step.tokens, step.parents, step.accepted, step.bonus = (two, three), (-1, 0), (), 7
    assert TokenLabels(tokenizer).of_step(step, [7, one, two])[:2] == ["1 of 4 bytes"] * 2


def byte_tokens(tokenizer: Any, data: bytes) -> list[int]:
    """The tokens of single bytes."""
    if (first := tokenizer.convert_tokens_to_ids("<0x00>")) not in (None, tokenizer.unk_token_id):
        return [first + byte for byte in data]
    return [token for byte in data for token in [tokenizer.encode(data.decode())[data.index(byte)]]]


# ---- stop strings


LETTERS = st.text("ab🙂\n", max_size=30)


@given(LETTERS, st.lists(st.text("ab🙂\n", min_size=1, max_size=6), max_size=2), st.integers(1, 7))
def test_stop_strings_equal_a_search_of_the_whole_text(
    text: str, strings: list[str], chunk: int
) -> None:
    """Wherever the steps cut them; the text is cut before the first."""
    tokenizer, limits = tiny_tokenizer(), Limits(stop=tuple(strings))
    ids, stop, found = tokenizer.encode(text), StopStrings(tokenizer, limits), None
    for begin in range(0, len(ids), chunk):
        if (count := stop.push(ids[begin : begin + chunk])) is not None:
            found = begin + count
            break
    places = [at for string in strings if (at := text.find(string)) >= 0]
    ends = [text.find(string) + len(string) for string in strings if string in text]
    assert found == min((len(text[:end].encode()) for end in ends), default=None)
    assert whole_text(tokenizer, ids, limits) == text[: min(places, default=None)]


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("ab<|user|>cd", "<|user|>", "ab"),
        ("ab<|system|>cd\n<|user|>ef", "\n<|user|>", "abcd"),
        ("ab<|user|>\n\ncd", "<|user|>\n", "ab"),
    ],
)
def test_a_stop_string_with_a_special_token_ends_the_text(
    text: str, stop: str, shown: str, chunk: int
) -> None:
    """Though the text never shows that token."""
    tokenizer, limits = byte_tokenizer(), Limits(stop=(stop,))
    ids, stops = tokenizer.encode(text), StopStrings(byte_tokenizer(), limits)
    counts = (stops.push(ids[at : at + chunk]) for at in range(0, len(ids), chunk))
    ends = [at * chunk + count for at, count in enumerate(counts) if count is not None]
    whole = tokenizer.encode(text[: text.find(stop) + len(stop)])
    assert ends[:1] == [len(whole)] and whole_text(tokenizer, whole, limits) == shown
