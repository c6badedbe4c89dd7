"""Normalisation and split of byte-level BPE families, by the name in tokenizer.ggml.pre.

A GGUF names its pre-tokenizer and says nothing of Unicode normalisation: the name stands for both.
Rows follow the model's original tokenizer, the last group llama.cpp. llama.cpp never normalises, so
a text in NFD gets other ids there than in the original. docs/models.md says what each row was
checked with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from windlass.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Text is normalised, then split by each pattern in turn, then every piece goes through BPE."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is in the vocabulary as a whole is not merged
    add_bos: bool = False  # if the file has no add_bos_token


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOL = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"


def _cl100k(number: str, word: str = r"\p{L}", symbol: str = _SYMBOL) -> str:
    """The pattern of GPT-4 and its many relatives."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{word}+|{number}|{symbol}|{_SPACE}"


def _o200k(number: str, contraction: str, without: str = "", symbol_end: str = r"[\r\n/]*") -> str:
    """The pattern of GPT-4o: a word also ends where upper case follows lower case."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{upper}*{lower}+{contraction}|{start}{upper}+{lower}*{contraction}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+{symbol_end}|{_SPACE}"


_LLAMA3 = _cl100k(number=r"\p{N}{1,3}")
_QWEN2 = _cl100k(number=_DIGIT)
_QWEN35 = _cl100k(number=_DIGIT, word=r"[\p{L}\p{M}]", symbol=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_SEED = _cl100k(number=_DIGIT, symbol=r" ?[^\s\p{L}\p{N}\r\n]+")
_GPT4O = _o200k(number=r"\p{N}{1,3}", contraction=f"{_CONTRACTION}?")
_TEKKEN = _o200k(number=_DIGIT, contraction="")
_KIMI = r"\p{Han}+|" + _o200k(
    number=r"\p{N}{1,3}",
    contraction=f"{_CONTRACTION}?",
    without=r"&&[^\p{Han}]",
    symbol_end=r"[\r\n]*",
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT)
# Letters with a case, as the original tokenizer.json lists them; the list has gaps (Armenian).
_DEEPSEEK_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    _DIGIT,
)
# What llama.cpp does for files that name no family of their own.
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_LLAMA3_ROW = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "phi-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((_DIGIT, _GPT2)),
    "command-r": PreTokenizer((_DIGIT, _GPT2), nfc=True),
    "olmo": PreTokenizer((_GPT2,), nfc=True),
    "mpt": PreTokenizer((_GPT2,), nfc=True),
    "llama-bpe": _LLAMA3_ROW,
    "llama3": _LLAMA3_ROW,
    "llama-v3": _LLAMA3_ROW,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "stablelm2": PreTokenizer((_QWEN2,), nfc=True),
    "hunyuan": PreTokenizer((_QWEN2,), nfc=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,), nfc=True),  # as Qwen 2.5
    # Not verified: that the original does not normalise to NFC.
    "starcoder": PreTokenizer((_DIGIT, _GPT2)),
    "refact": PreTokenizer((_DIGIT, _GPT2)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    # Split as llama.cpp splits; the original was not at hand.
    "falcon-h1": _LLAMA3_ROW,
    "falcon3": _LLAMA3_ROW,
    "lfm2": _LLAMA3_ROW,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "pixtral": _LLAMA3_ROW,
    "llama4": PreTokenizer((_GPT4O,)),
    "hunyuan-dense": PreTokenizer(_DEEPSEEK3),
    "minerva-7b": PreTokenizer((_DIGIT, _GPT2)),
    "seed-coder": PreTokenizer((_SEED,)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "default": PreTokenizer(_DEFAULT),
}


def pre_tokenizer(name: str | None, source: Path) -> PreTokenizer:
    """The row of the table; a name that is not in it is refused."""
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    problem = f"pre-tokenizer {name!r} is not known" if name else "no pre-tokenizer is named"
    raise UnsupportedError(
        f"{source}: {problem}, so text would be split wrongly. "
        f"Known: {', '.join(PRE_TOKENIZERS)}. Give the original tokenizer with --tokenizer FOLDER."
    )
