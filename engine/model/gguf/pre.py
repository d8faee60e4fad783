"""How each `tokenizer.ggml.pre` splits a text before its pieces are merged into tokens.

The expressions are those of the published tokenizers, in the form in which llama.cpp, which gave
the names, applies them; where that differs (it knows letters, but neither upper nor lower case
beyond ASCII), the pieces are llama.cpp's.
Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

_ENDING = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
"""English contractions."""
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDING}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_ENDING}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_ASCII_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_WORD = rf"{_ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK = rf"{_DEEPSEEK_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_CJK_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff&&[^\\s]]+"
_THREE = r"\p{N}{1,3}"
_DIGITS_FROM_RIGHT = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Groups of three digits from the right; the first keeps what precedes it."""
_SENTENCE = " ?[^(\\s|.,!?…。，、।۔،)]+"
_LINES = r"[^\n]+|[\n]+"


def _cased(letter: str, ending: str = "") -> str:
    """Words that begin a new piece at a capital letter after a small one.

    Args:
        letter: a class; only ASCII letters have case.
    """
    upper, lower = rf"(?:(?={letter})[^a-z])", rf"(?:(?={letter})[^A-Z])"
    first = r"[^\r\n\p{L}\p{N}]?"
    return rf"{first}{upper}*{lower}+{ending}|{first}{upper}+{lower}*{ending}"


_CASED_WORD = _cased(r"\p{L}", f"{_ENDING}?")
_CASED_MARKED_WORD = _cased(r"[\p{L}\p{M}]", f"{_ENDING}?")
_TEKKEN = _cased(r"\p{L}") + rf"|\p{{N}}|{_SLASHES}|{_SPACES}"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_ANY_CASE_WORD = f"{_MARKED_WORD}{_ENDING}?"
_HAN = (
    r"[\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}"
    r"\x{2F800}-\x{2FA1F}]"
)
_KIMI_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?(?:(?!{_HAN})\p{{L}})+{_ENDING}?"
_KIMI = rf"{_HAN}+|{_KIMI_WORD}|{_THREE}|{_MARKS}|{_SPACES}"
_CASED_LETTERS = (
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿ"
    "ᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134"
    "\u2139\u213c-\u213f\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_AFMOE_ASIA = (
    "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff"
    "가-\ud7afᄀ-ᇿ]+"
)
_YOUTU_ASIA = f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_CJK}"
_RUNS_OF_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512 256 128 64 32 16 8 4 1,2".split()))
_SPARK = rf"{_DEEPSEEK_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]?"
_EXAONE_WORD = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"

_OTHER_MARKS = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_LAST_SPACES = r"\s*[\r\n]|\s+(?!\S)|\s+"

_LLAMA3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_TABLE: dict[str, tuple[str, ...]] = {
    _LLAMA3_NAMES: (_LLAMA3,),
    "glm4 glm5 dbrx smaug-bpe chatglm-bpe": (_LLAMA3,),
    "jais-2": (rf"{_ENDING}|{_WORD}|{_THREE}|{_MARKS}|\s*[\r\n]+|{_RUNS_OF_SPACES}|\s",),
    "minicpm5": (_THREE, rf"{_ENDING}|{_WORD}|\p{{N}}+|{_MARKS}|{_SPACES}"),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan grok-2 solar-open": (_QWEN2,),
    "laguna": (_LINES, _QWEN2),
    "ufakzeka": (rf"{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}",),
    "qwen35": (rf"{_ENDING}|{_MARKED_WORD}|\p{{N}}|{_OTHER_MARKS}|{_SPACES}",),
    "seed-coder": (rf"{_ENDING}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    "bailingmoe bailingmoe2 llada-moe": (rf"{_ENDING}|{_WORD}|\p{{N}}|{_MARKS}|{_LAST_SPACES}",),
    "exaone-moe": (rf"{_ENDING}|{_EXAONE_WORD}|\p{{N}}|{_EXAONE_MARKS}|{_LAST_SPACES}",),
    "mpt gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum": (_GPT2,),
    "modern-bert jina-v1-en jina-v2-code roberta-bpe olmo jais exaone4 trillion": (_GPT2,),
    "granite-docling": (_GPT2,),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (r"\p{N}", _GPT2),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"),
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"),
    "deepseek-llm": (
        "[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
        r"\s+\z",
        _CJK_AND_HANGUL,
        r"\p{N}+",
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}"),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": (_THREE, _CJK, _DEEPSEEK),
    "spark2_5": (_THREE, _CJK, _SPARK, r"\p{N}"),
    "afmoe": (_DIGITS_FROM_RIGHT, _AFMOE_ASIA, _DEEPSEEK),
    "youtu": (_YOUTU_ASIA, rf"{_ANY_CASE_WORD}|\p{{N}}|{_SLASHES}|{_SPACES}"),
    "tiny_aya cohere2moe": (
        _DIGITS_FROM_RIGHT,
        rf"{_ANY_CASE_WORD}|{_THREE}|{_SLASHES}|{_SPACES}",
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (f"{_CASED_WORD}|{_THREE}|{_SLASHES}|{_SPACES}",),
    "granite-embed-multi-97m": (f"{_CASED_MARKED_WORD}|{_THREE}|{_SLASHES}|{_SPACES}",),
    "tekken": (_TEKKEN,),
    "kimi-k2": (_KIMI,),
    "superbpe": (r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))"),
    "poro-chat bloom gpt3-finnish": (_SENTENCE,),
    "viking": (_SENTENCE, r"\p{N}"),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        "[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ),
    "gemma4 granite-embed-multi-311m sarvam-moe": (_LINES,),
}
PATTERNS = {name: patterns for names, patterns in _TABLE.items() for name in names.split()}
"""Expressions by the name in `tokenizer.ggml.pre`, applied one after another: each splits every
piece into its matches and what lies between. `whitespace` and `mmbert` belong to encoders."""
IGNORE_MERGES = frozenset(
    f"{_LLAMA3_NAMES} glm4 glm5 minicpm5 youtu granite-embed-multi-97m tekken".split()
)
"""Where a piece that is a token is that token, whatever the merges say."""
ADD_BOS = frozenset(f"{_LLAMA3_NAMES} tekken chameleon gemma4 granite-embed-multi-311m".split())
"""Where a text begins with BOS if the file does not say."""
RAW = frozenset("gemma4 granite-embed-multi-311m sarvam-moe".split())
"""Where spaces become `▁`, and characters without a token UTF-8 bytes such as `<0xE2>`; elsewhere
bytes are written in GPT-2's alphabet."""
