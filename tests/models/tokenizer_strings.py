"""250 strings on which tokenizers disagree, by the feature that each group exercises.

Combining marks, jamo and invisible characters are written as escapes: an editor that normalises
the file must not change what a test compares.
"""

from __future__ import annotations

import unicodedata

_ASCII = [
    "",
    " ",
    "a",
    "Hello, world!",
    "hello world",
    "HELLO WORLD",
    "camelCase PascalCase snake_case kebab-case SCREAMING_CASE",
    "The quick brown fox jumps over the lazy dog.",
    "What?! No... Yes; (maybe) [or] {not} <at> all: 'quoted' \"double\" `tick`",
    "e-mail: first.last+tag@example.org, https://example.org/a/b?c=d&e=f%20g#h",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "C:\\Users\\name\\file.txt and /usr/local/bin/python3",
    "~!@#$%^&*()_+`-={}|[]\\:\";'<>?,./",
    "A.B.C. U.S.A. e.g. i.e. etc.",
    "x=1;y=2;z=x+y",
    "aAbBcCdD iPhone eBay McDonald XMLHttpRequest getURL",
]

_CODE = [
    "def f(x: int) -> int:\n    return x**2  # squared\n",
    "class A(B):\n\tdef __init__(self):\n\t\tself.x = {}\n\n\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * 0.5f; }",
    "if (a && b || !c) {\n  return a?.b ?? c;\n}\n",
    '{"key": [1, 2.5, null, true], "n\u00e4me": "v\u00e4lue"}',
    "<html><body class='x'>&nbsp;<br/></body></html>",
    "SELECT * FROM t WHERE a = 'b' AND c >= 10 -- comment\n",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 42); }',
    'fn main() { let v: Vec<u8> = vec![0; 16]; println!("{:?}", v); }',
    "$ git commit -m 'fix: a bug' && git push --force-with-lease origin HEAD:main",
    "/* multi\n * line\n */\n// one line\n",
    "\\begin{equation} \\frac{a}{b} = \\sqrt{x^2 + y_1} \\end{equation}",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "```python\nprint('hi')\n```\n",
    "x := <-ch; go func() { defer wg.Done() }()",
    "        deep\n            deeper\n                deepest\n    back\n",
]

_WHITESPACE = [
    "  two leading spaces",
    "   three leading spaces",
    "trailing spaces   ",
    "one  two   three    four     five",
    "tabs\tand\t\ttabs\t\t\t",
    "new\nlines\n\n\nand more\n\n\n\n",
    "\n",
    "\n\n",
    "\n\n\n\n\n\n\n\n\n",
    "\t",
    "\t\t\t\t",
    " \n \n  mixed \t \n",
    " \t \t \n\t \n",
    "a \n b",
    "a\n b",
    "a \nb",
    "a  \n  b",
    "\r\n",
    "line one\r\nline two\r\n\r\nline four\r\n",
    "old\rmac\rlines\r\r",
    "\n\r\n\r",
    "vertical\x0btab and form\x0cfeed",
    "nbsp\u00a0between\u00a0\u00a0words",
    "ideographic\u3000space \u3000 mixed",
    "thin\u2009en\u2002em\u2003hair\u200afigure\u2007narrow\u202f.",
    "line\u2028separator paragraph\u2029separator next\u0085line",
    " " * 33,
    "a" + " " * 20 + "b",
    "\n".join(" " * n + "x" for n in range(10)),
]

_NUMBERS = [
    "1",
    "12",
    "123",
    "1234",
    "12345",
    "1234567890",
    "3.14159",
    "1,234,567.89",
    "-0.001e-10",
    "x1y22z333w4444",
    "  7 77  777",
    "2024-01-31T23:59:59.999Z",
    "192.168.0.1:8080",
    "0x1F 0b1010 0o17 1_000_000",
    "\u00bd \u00be \u2155 \u2167 \u00b2\u00b3 \u2460\u2461",
    "\u0663\u0664\u0665 \u09e7\u09e8\u09e9 \u0967\u0968\u0969 \u0e51\u0e52\u0e53",
    "\uff11\uff12\uff13 \u4e00\u4e8c\u4e09 100\uff05",
    "1st 2nd 3rd 4th 21st $5.00 \u20ac10 50% \u00b15\u00b0",
    "9" * 40,
    "1 2 3 4 5 6 7 8 9 10 11 12",
]

_CONTRACTIONS = [
    "It's, they're, we've, I'm, you'll, he'd, can't",
    "IT'S THEY'RE WE'VE I'M YOU'LL HE'D CAN'T",
    "It'S TheY'Re we'Ve i'M you'lL he'D",
    "'s 't 're 've 'm 'll 'd",
    "'S'T'RE'VE'M'LL'D",
    "rock'n'roll o'clock y'all'd've 'twas",
    "it\u2019s they\u2019re we\u2019ve I\u2019m you\u2019ll",
    "''' '' ' \u2018quoted\u2019 \u201cdouble\u201d \u00abguillemets\u00bb",
    "'\u017f 's'\u017f the long s folds to s",
    "d'Artagnan l'homme qu'il aujourd'hui",
]

_COMBINING = [
    "cafe\u0301",
    "caf\u00e9",
    "cafe\u0301 caf\u00e9 cafe\u0301",
    "e\u0301e\u0300e\u0302e\u0308",
    "A\u030angstro\u0308m",
    "\u212bngstr\u00f6m \u212a \u2126",
    "n\u0303 \u00f1 N\u0303 \u00d1",
    "c\u0327a\u0300 et la\u0300",
    "Vie\u0323\u0302t Nam tie\u0302\u0301ng Vie\u0323\u0302t",
    "Vi\u1ec7t Nam ti\u1ebfng Vi\u1ec7t",
    "q\u0307\u0323 q\u0323\u0307",
    "a\u0328\u0301 a\u0301\u0328",
    "s\u0323\u0307 \u1e69",
    "\u0301 alone, \u0301\u0302\u0303 stacked",
    "z\u0351\u0343\u034a\u0310a\u0364\u0367\u0309l\u0350\u0344g\u036e\u0311o\u0366\u0300",
    "x\u0338 =\u0338 <\u0338 >\u0338",
    "1\u0308 2\u20e3 !\u0301 _\u0332",
    "i\u0307 \u0130 \u0131 I\u0307",
    "\u01d5 U\u0308\u0304 \u00dc\u0304",
    "e\u0301\u200d\u0301e",
    "A\u0300\u0301\u0327 o\u031b\u0323 \u01a1\u0323",
]

_NORMAL_FORMS = [
    *dict.fromkeys(
        unicodedata.normalize(form, text)
        for text in (
            "\u00c0\u00c9\u00ce\u00d5\u00dc \u00e0\u00e9\u00ee\u00f5\u00fc",
            "\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
            "\u304c\u304e\u3050 \u30d1\u30d4\u30d7",
            "\u0958\u0959 \u09dc\u09dd \u0a33",
            "\ufb01\u0301 \ufb02 \ufb00 \ufb06 \u00e9",
            "\u2460 \u00b2 \u2122 \u00bd \u3392 \u1e9b\u0323",
            "\u03d3 \u1fbd \u0385 \u1fc1 \u1f82",
            "\u0344 \u0374 \u037e \u0387 \u2000",
            "\u1e14 \u0112\u0300 \u1e0d\u0307",
        )
        for form in ("NFC", "NFD", "NFKC", "NFKD")
    )
]

_COMPATIBILITY = [
    "\ufb01nd the \ufb02ow in o\ufb03ce",
    "\uff28\uff45\uff4c\uff4c\uff4f\uff0c\uff37\uff4f\uff52\uff4c\uff44\uff01",
    "\uff76\uff9e\uff77\uff9e\uff78\uff9e \uff8a\uff9f",
    "\U0001d518\U0001d52b\U0001d526\U0001d520\U0001d52c\U0001d521\U0001d522 \U0001d4dc\U0001d4ea\U0001d4fd\U0001d4f1",
    "\u2122 \u00ae \u00a9 \u2120 \u2117",
    "\u210c \u2115 \u211d \u2124 \u2202 \u2211 \u222b \u221e",
    "\u00aa \u00ba \u02b0 \u1d43 \u2071 \u207f \u2080",
    "\u3300 \u3371 \u33a1 \u32ff",
    "\uf900 \uf901 \uf902 \ufa0e \ufa10 \U0002f800",
    "\u1e9e \u00df \u017f \u0149 \u01c4 \u01c5 \u01c6",
    "\u2024\u2025\u2026 \u2047 \u2048 \u203c",
    "\uffe6 \uffe5 \uffe1",
]

_CJK = [
    "\u4e2d\u6587\u5b57\u7b26\u6d4b\u8bd5",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u4eca\u5929\u5929\u6c14\u600e\u4e48\u6837\uff1f",
    "\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e",
    "\u7e41\u9ad4\u4e2d\u6587\uff0c\u6e2c\u8a66\u300c\u5f15\u865f\u300d\u3002",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u3072\u3089\u304c\u306a\u3068\u30ab\u30bf\u30ab\u30ca\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u30fc\u30fc\u3063",
    "\u3041\u3042\u3043 \u30a1\u30a2 \u30fb \u30fc \u3005 \u3006",
    "\U00020000\U0002a6d6 \u9fa5\u9fa6\u9fff \u3400\u4db5",
    "\u4e2d English \u6587 mixed\u6587\u5b57text",
    "\u3007\u3012\u3013 \u2e80 \u2f00 \u31c0",
    "\u3105\u3106\u3107 \u3109",
    "\uff0c\u3002\uff01\uff1f\uff1b\uff1a\u300a\u300b\u3010\u3011\u2026\u2026\u2014\u2014",
]

_HANGUL = [
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165",
    "\u1112\u1161\u11ab \ud55c \u3147\u314f\u3134",
    "\uac00\u11a8 \uac01",
    "\u1100\u1161\u11a8\u11a8 \ud7a3 \ud7b0",
    "\u314b\u314b\u314b\u314b \u3160\u3160",
    "\u115f\u1160 \u3164 \uffa0",
]

_RIGHT_TO_LEFT = [
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u0645\u064e\u0631\u0652\u062d\u064e\u0628\u064b\u0627 \u0628\u0650\u0643\u064f\u0645\u0652",
    "\u0627\u0644\u0652\u062d\u064e\u0645\u0652\u062f\u064f \u0644\u0650\u0644\u0651\u064e\u0647\u0650",
    "\u0627\u0653 \u0622 \u0627\u0654 \u0623 \u0648\u0654 \u0624",
    "\ufefb \ufe8d\ufedf\ufedb \ufdfa",
    "\u0633\u0644\u0627\u0645\u060c \u062f\u0646\u06cc\u0627\u061f \u06a9\u06cc\u0644\u0648 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05d1\u05bc\u05b0\u05e8\u05b5\u05d0\u05e9\u05c1\u05b4\u05d9\u05ea",
    "\ufb2a \u05e9\u05c1 \ufb4f \ufb1d",
    "\u202bembedded\u202c \u200fmark\u200e \u2067isolate\u2069",
]

_INDIC_AND_THAI = [
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902 \u092a\u093e\u0920",
    "\u0915\u094d\u0937\u0924\u094d\u0930\u093f\u092f \u0936\u094d\u0930\u0940 \u0930\u093e\u091c\u094d\u092f",
    "\u0915\u093c \u0958 \u0921\u093c \u095c \u0928\u093c \u0929",
    "\u0915\u094d\u200d\u0937 \u0915\u094d\u200c\u0937",
    "\u09ac\u09be\u0982\u09b2\u09be \u09ad\u09be\u09b7\u09be \u0995\u09c7\u09be \u0995\u09cb",
    "\u0ba4\u0bae\u0bbf\u0bb4\u0bcd \u0bae\u0bca\u0bb4\u0bbf \u0bae\u0bc6\u0bbe",
    "\u0c24\u0c46\u0c32\u0c41\u0c17\u0c41 \u0d2e\u0d32\u0d2f\u0d3e\u0d33\u0d02",
    "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e04\u0e23\u0e31\u0e1a",
    "\u0e01\u0e33 \u0e01\u0e4d\u0e32 \u0e19\u0e49\u0e33 \u0e17\u0e35\u0e48\u0e19\u0e35\u0e48",
    "\u0e81\u0eb3 \u0eaa\u0eb0\u0e9a\u0eb2\u0e8d\u0e94\u0eb5",
    "\u1000\u103c\u102d\u102f\u1006\u102d\u102f\u1015\u102b \u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f",
    "\u0f56\u0f7c\u0f51\u0f0b\u0f66\u0f90\u0f51\u0f0b \u0f43 \u0f42\u0fb7",
]

_EUROPEAN = [
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0401\u043b\u043a\u0430 \u0438\u0306 \u0439 \u0435\u0308 \u0451",
    "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 \u0407\u0456\u0457\u0454\u0491",
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5 \u039a\u03cc\u03c3\u03bc\u03b5 \u1f00\u03c1\u03c7\u03ae \u03b1\u0313\u0301 \u1f04",
    "na\u00efve fa\u00e7ade \u00dcber stra\u00dfe \u00e6\u00f8\u00e5 \u0142\u00f3d\u017a \u010de\u0161tina",
    "T\u00fcrk\u00e7e \u0130stanbul \u0131\u015f\u0131k rom\u00e2n\u0103 \u0219\u021b \u015f\u0163",
    "\u0540\u0561\u0575\u0565\u0580\u0565\u0576 \u10e5\u10d0\u10e0\u10d7\u10e3\u10da\u10d8 \u1c90",
    "\u1200\u1208\u1210 \u13a0\u13a1 \u16a0\u16a2 \u2c00 \u1680",
]

_EMOJI = [
    "\U0001f600\U0001f603\U0001f604",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "\U0001f468\U0001f3fd\u200d\U0001f4bb \U0001f44d\U0001f3ff",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 \U0001f1fa",
    "\u2764\ufe0f \u2764 \u2764\ufe0e",
    "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f3f4\u200d\u2620\ufe0f",
    "\U0001f636\u200d\U0001f32b\ufe0f (face in clouds)",
    "1\ufe0f\u20e3 #\ufe0f\u20e3 *\ufe0f\u20e3",
    "\u2705 \u2b50\ufe0f \u26a1 \u2600\ufe0f\u2601",
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "text\U0001f680text \U0001f680\U0001f680\U0001f680",
    "\U0001fae0 \U0001fac2 \U0001f9d1\u200d\U0001f9af",
]

_CONTROL = [
    "\x00",
    "a\x00b",
    "\x01\x02\x03\x04 \x05\x06\x07\x08",
    "\x0e\x0f\x10 \x1b[31mred\x1b[0m \x7f",
    "\x80\x81\x9f\u00ad soft\u00adhyphen",
    "zero\u200bwidth\u200cnon\u200djoiner\u2060word",
    "\ufeffbyte order mark\ufeff",
    "\ufffd \ufffc \ufff9\ufffa\ufffb",
    "\ue000\uf8ff \U000f0000 \U0010fffd",
    "\ufdd0 \uffff \U0001ffff \U0010ffff",
    "\ud7ff\ue000",
    "\u0378\u0379 \u2fe0 \U000323b0 \U000e0fff",
    "\u2066\u2069\u061c\u180e",
]

_SPECIAL_LIKE = [
    "<s> </s> <unk> <pad> <bos> <eos>",
    "<|endoftext|",
    "<| endoftext |> <|end_of_text |>",
    "|endoftext|> <|> <||> |>",
    "<0x0A> <0xE2> <0x41>",
    "\u2581 \u2581\u2581word \u2581",
    "\u0120 \u010a \u0100 \u0122",
    "[INST] hi [/INST] [PAD] [UNK] [CLS]",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call>",
    "<\uff5cUser\uff5c>hi<\uff5cAssistant\uff5c>",
    "## a@@ ##b </w> ##",
]

_RUNS = [
    "a" * 100,
    "ab" * 60,
    "A" * 64,
    "\u4e2d" * 40,
    "e\u0301" * 30,
    "e" + "\u0301" * 30,
    "\U0001f600" * 20,
    "!" * 50,
    "-" * 80,
    "=" * 33 + ">",
    "." * 17,
    "\n" * 40,
    "\t" * 30,
    "abc " * 30,
    " a" * 40,
    "0123456789" * 8,
    "/" * 20 + "\n",
    "?!" * 20,
]

GROUPS = {
    "ascii": _ASCII,
    "code": _CODE,
    "whitespace": _WHITESPACE,
    "numbers": _NUMBERS,
    "contractions": _CONTRACTIONS,
    "combining": _COMBINING,
    "normal forms": _NORMAL_FORMS,
    "compatibility": _COMPATIBILITY,
    "cjk": _CJK,
    "hangul": _HANGUL,
    "right to left": _RIGHT_TO_LEFT,
    "indic and thai": _INDIC_AND_THAI,
    "european": _EUROPEAN,
    "emoji": _EMOJI,
    "control": _CONTROL,
    "special-token-like": _SPECIAL_LIKE,
    "runs": _RUNS,
}
STRINGS = [text for group in GROUPS.values() for text in group]
