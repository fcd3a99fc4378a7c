"""Byte-level BPE in plain Python, for tests: the documented steps, one after another.

text -> the special tokens in it, and what lies between
     -> pieces: each pattern in turn splits them; what it does not match stays a piece
     -> bytes, written as characters -> merges, the first of the list first
         -> ids; a byte that the vocabulary lacks has none
"""

from functools import lru_cache

import regex

SUFFIX = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def printable_bytes() -> list[str]:
    """GPT-2's character for each byte."""
    chars, others = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            chars.append(chr(byte))
        else:
            chars.append(chr(256 + others))
            others += 1
    return chars


CHARS = printable_bytes()


def split(patterns, text: str) -> list[str]:
    pieces = [text]
    for pattern in patterns:
        old, pieces = pieces, []
        for piece in old:
            end = 0
            for match in regex.finditer(pattern, piece):
                pieces += [piece[end : match.start()], match[0]]
                end = match.end()
            pieces.append(piece[end:])
    return [piece for piece in pieces if piece]


class PlainBpe:
    """Text to token ids.

    Args:
        tokens: the vocabulary in order.
        merges: pairs of tokens, the first merged first.
        patterns: how a text is split before.
        special: tokens that are found in a text before it is split.
        takes_whole: a piece that is a token is not merged from its bytes (ignore_merges).
    """

    def __init__(self, tokens, merges, patterns, special=(), takes_whole=False):
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {pair: i for i, pair in reversed(list(enumerate(merges)))}
        self.patterns, self.takes_whole = patterns, takes_whole
        longest_first = sorted(special, key=len, reverse=True)
        self.special = regex.compile("|".join(map(regex.escape, longest_first)) or "(?!)")
        self.merge = lru_cache(100_000)(self._merge)

    def encode(self, text: str) -> list[int]:
        ids, end = [], 0
        for match in self.special.finditer(text):
            ids += [*self._plain(text[end : match.start()]), self.ids[match[0]]]
            end = match.end()
        return ids + self._plain(text[end:])

    def has_all_bytes(self, text: str) -> bool:
        return all(CHARS[byte] in self.ids for byte in text.encode())

    def _plain(self, text: str) -> list[int]:
        return [i for piece in split(self.patterns, text) for i in self.merge(piece)]

    def _merge(self, piece: str) -> list[int]:
        parts = [CHARS[byte] for byte in piece.encode()]
        if self.takes_whole and "".join(parts) in self.ids:
            return [self.ids["".join(parts)]]
        while len(parts) > 1:
            ranks = [
                self.ranks.get(pair, len(self.ranks))
                for pair in zip(parts, parts[1:], strict=False)
            ]
            first = min(ranks)
            if first == len(self.ranks):
                break
            i = ranks.index(first)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts if part in self.ids]


# ---- texts --------------------------------------------------------------------------------

CORPUS = [
    "Steps:\n\n1. foo\n2. bar\n\n\n10. baz",
    "def f(x: int) -> list[int]:\n\n    return [x**2, 0x1F, 1_000_000, 3.14e-10]  # 42\n\n",
    '\tif (a[i] != b->c) { printf("%d\\n", 12345); }\r\n\t}\r\n\r\n',
    "I'll say it's 1234567 o'clock; WE'VE DON'T 'Twas HTMLParser camelCase getURL2",
    "漢字とカタカナ、ひらがな。한국어 텍스트 2024年12月31日，中文（测试）！",
    "👩‍👩‍👧 👍🏽🇫🇷 🦊🦊 café crème, cafe\u0301 ½ Ⅷ ٣٤٥ ५६ ²³",
    "  leading,   runs   of    spaces  \n \n  and tabs\t\t\t\n\u00a0\u3000\u2003end   ",
    "https://example.com/a?b=1&c=%20#x user@mail.org $5.00 #1 @2 <|x|> ~`^|+<=> “quoted” …",
    "Ünïcödé ΑΒΓ αβγ Привет МИР עברית العربية हिन्दी ไทย ǅ ʰ",
    "",
    " ",
    "\n\n 7",
]


def random_text(random) -> str:
    """Up to 60 pieces: words, digits, spaces, signs, and characters of any assigned kind."""
    kinds = [
        lambda: random.choice(["the", "It", "def", "HTML", "'s", "'LL", "don't", " a", "x"]),
        lambda: str(random.randrange(10 ** random.randint(1, 8))),
        lambda: random.choice(
            [" ", "  ", "\n", "\n\n", "\t", "\r\n", "    ", "\u00a0", "\x85"]
        ),
        lambda: random.choice("!?.,;:-_/\\()[]{}<>|=+*&^%$#@~`'\"…，。、！。،"),
        lambda: random.choice(
            "漢字仮名かなカナ한글éüßñΩжשع٣५½²Ⅷ🦊😀👍🏽‍e\u0301ह\u093fǅʰ\u200b\ufeff"
        ),
        lambda: random.choice(ANY),
    ]
    return "".join(random.choice(kinds)() for _ in range(random.randint(0, 60)))


def assigned() -> list[str]:
    """Characters that Unicode 14 knows and that all later versions treat alike."""
    import unicodedata

    return [
        chr(c)
        for c in range(0x30000)
        if unicodedata.category(chr(c)) not in ("Cn", "Cs") and c != 0x295
    ]


ANY = assigned()
