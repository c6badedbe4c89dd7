"""Strings that tokenizers disagree about."""

from __future__ import annotations

import random

_PLAIN = [
    "",
    " ",
    "Hello, world!",
    "hello world",
    "  two leading spaces",
    "trailing spaces   ",
    "tabs\tand\t\ttabs",
    "new\nlines\n\n\nand\r\nreturns\r",
    " \n \n  mixed \t \n",
    "It's, they're, we've, I'm, you'll, he'd, DON'T, 'S",
    "1",
    "12",
    "123",
    "1234567890",
    "3.14159",
    "x1y22z333",
    "  7",
    "a  12  b",
    "½ Ⅷ ²³ ٣٤",
    "def f(x: int) -> int:\n    return x**2  # squared\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    '{"key": [1, 2.5, null, true], "näme": "välue"}',
    "<html><body class='x'>&nbsp;</body></html>",
    "naïve café Ünïcödé ẞ ſ İ ı",
    "e\u0301 vs \u00e9, A\u030a vs \u00c5",
    "中文字符，日本語テキスト、한국어 문장。",
    "Привет мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "हिन्दी में पाठ ภาษาไทย",
    "😀😃 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ✅",
    "zero\u200bwidth\u200djoiner\ufeffbom\u00a0nbsp\u3000ideographic",
    "\x00\x01\x7f control",
    "$100 + €50 = £120? #tag @user https://example.org/a?b=c&d=e%20f",
    "!!!???...---___***///\\\\\\",
    "a" * 50,
    "ab" * 40,
    " " * 33,
    "\n" * 9,
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝓂𝒶𝓉𝒽 ﬁ ﬂ ①②③",
]
SPECIAL = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more text<|endoftext|>",
    "<|im_end|><|im_end|> <|im_end|>",
    "<repo_name>x<file_sep>a.py\n<|im_start |> <|im_end",
]


def diverse(count: int = 300) -> list[str]:
    """The strings above, and random joins of pieces of them; the same ones every time."""
    source = random.Random(0)
    words = [word for text in _PLAIN for word in text.split(" ")] + [
        " ",
        "  ",
        "\n",
        "\t",
        "'",
        "9",
    ]
    joined = [
        source.choice(["", " "]).join(source.choices(words, k=source.randint(1, 12)))
        for _ in range(count)
    ]
    return _PLAIN + joined
