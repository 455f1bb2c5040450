"""Values in keys that look alike, spell separators or do not end: different ones never share a bucket."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator

from limitgate import Caller, Rule, RuleSet
from limitgate.rules.callers import KnownCaller
from tests.attacks.world import ATTACKER, LIMIT, VICTIM, Ask, Outcome, all_refused, attack, one_bucket, own_buckets

PAIRS = [
    ("a", "b"),
    ("a,b", ""),
    ("a", "b,"),
    ("a:b", ""),
    ("a:1:b", "c"),
    ("1:a,header:x-b:1:b", "c"),
    ("a", "1:b,header:x-a:1:a"),
    ("x,header:x-b:y", "z"),
    ("x", "y,header:x-b:z"),
    ("x,header:x-b:1:y", "z"),
    ("x", "1:y,header:x-b:z"),
    ("header:x-a:1:a,", "header:x-b:1:b,"),
    ("header:x-a:1:a,header:x-b:1:b,", "x"),
    ("ab", ""),
    ("", "ab"),
    ("", "a,b"),
    ("absent:11:203.0.113.9,", "x"),
    ("x", "absent:11:203.0.113.9,"),
    (ATTACKER, "x"),
    ("x", ATTACKER),
    ("nobody,", "nobody,"),
    ("nobody,", "x"),
    ("None", "None"),
    ("a|b", "c"),
    ("a", "b|c"),
    ("a\x00b", "c"),
    ("a", "\x00b"),
    ("a\x1fb", "c"),
    ("a;b", "c"),
    ("a b", "c"),
    ("a\tb", "c"),
    ("%61", "b"),
    ("A", "b"),
    ("a", "B"),
    ("a" * 200, "b"),
    ("a" * 201, "b"),
    ("a" * 5000, "b"),
    ("a" * 4999 + "b", "b"),
    ("b" + "a" * 4999, "b"),
    ("header:x-a digest", "b"),
    (hashlib.blake2b(b"a" * 5000, digest_size=16).hexdigest(), "b"),
]
"""Values of two headers, none of which may be taken for another pair's."""

LIKE_K = [
    "K",
    "k",
    "\u212a",
    "\uff2b",
    "\u039a",
    "\u041a",
    "K\u0301",
    unicodedata.normalize("NFC", "K\u0301"),
    "\u1e30",
    "K\u200b",
    "\u200bK",
    "K\u00ad",
    "\u202eK",
    "K\u202c",
    "\ufeffK",
    "\u00e9",
    "e\u0301",
    "\u00c5",
    "\u212b",
    "A\u030a",
    "\ud800",
    "\udc80",
    "\ud800\udc00",
    "\U00010000",
    "K\x00",
    "\x00K",
    "\u0130",
    "i\u0307",
    "I",
    "\u0131",
    "ß",
    "ss",
    "ﬁ",
    "fi",
    "\uff11",
    "1",
    "²",
    "2",
]
"""Texts that some comparison or other takes for one another."""

RAW = [b"\xc0\xaf", b"/", b"\xe0\x80\xaf", b"\xff", b"\xfe", b"\xff\xfe", b"\xed\xa0\x80", b"\xc3\xa9", b"\xe9", b"e\xcc\x81"]
"""Bytes that are no UTF-8, overlong UTF-8, and one letter in three encodings."""


def _sent(text: str) -> str:
    """Text as its bytes look in a header that is read as latin-1."""
    return text.encode("utf-8", "surrogatepass").decode("latin-1")


@attack("separators and absent values in a key of two headers")
def separators() -> Outcome:
    """Each pair of values is a client of its own."""
    asks = [Ask([(name, value) for name, value in zip(("X-A", "X-B"), pair) if value]) for pair in dict.fromkeys(PAIRS)]
    return own_buckets(asks, Rule("all", LIMIT, key=["header:x-a", "header:x-b"]))


@attack("Unicode that looks alike, and bytes that are none")
def look_alikes() -> Outcome:
    """Nobody gets into another's bucket by a letter that looks the same, and no bytes are dropped or made alike."""
    texts = [*map(_sent, LIKE_K), *(raw.decode("latin-1") for raw in RAW)]
    values = [value for value in dict.fromkeys(texts) if value == value.strip()]
    outcome = own_buckets([Ask([("X-A", value)]) for value in values], Rule("all", LIMIT, key=["header:x-a"]))
    return outcome + own_buckets([Ask([("X-API-Key", value)]) for value in values], Rule("all", LIMIT, key=["api_key"]))


@attack("names that the application gives its callers")
def callers_alike() -> Outcome:
    """What ``identify`` returns is a caller's name to the letter, whatever it is made of."""
    names = dict(enumerate([*LIKE_K, *(part for pair in PAIRS for part in pair if part), "all", "default", ""]))
    names = {place: name for place, name in names.items() if name and name not in list(names.values())[:place]}
    asks = [Ask([("X-Place", str(place))]) for place in names]

    def identify(request) -> Caller | None:
        return Caller(names[int(request.headers["x-place"])])

    return own_buckets(asks, Rule("all", LIMIT, key=["caller"]), identify=identify)


HOSTS = [
    "shop.example",
    "SHOP.EXAMPLE",
    "Shop.Example.",
    "shop.example:",
    "shop.example:80",
    "shop.example:65536",
    "shop.example:00080",
    "shop.example.:443",
    "shop.example:x",
    "shop.example:80x",
    "shop.example:-1",
    "shop.example:80:80",
    "shop.example: 80",
    "shop.example:\xff",
    " shop.example",
    "shop.example\t",
    "shop.example, other.example",
    "shop.example,",
]
"""What Starlette's ``Host`` and ``TrustedHostMiddleware`` take for shop.example."""


@attack("one host in many spellings")
def one_host() -> Outcome:
    """A host that the framework takes for the same is the same, so ports that are none open no buckets."""
    rules = [Rule("all", LIMIT, key=["host"])]
    honest, twice = Ask([("Host", "shop.example")]), Ask([("Host", "shop.example"), ("Host", "shop.example")])
    return one_bucket(
        honest, [*(Ask([("Host", host)]) for host in HOSTS), twice], [Ask([("Host", "other.example")])], rules=rules
    )


KEY, OTHER_KEY, UNICODE_KEY = "vip-key-4711", "other-key-4712", "schl\u00fcssel-4713"


def _listing() -> RuleSet:
    def known(name: str, key: str) -> KnownCaller:
        return KnownCaller(id=name, api_key=f"sha256:{hashlib.sha256(key.encode()).hexdigest()}", tier="vip")

    return RuleSet(
        [
            Rule("all", LIMIT, key=["ip"]),
            Rule("all", LIMIT, key=["api_key"], tier="vip"),
        ],
        [known("vip", KEY), known("other", OTHER_KEY), known("unicode", UNICODE_KEY)],
    )


def _keys() -> Iterator[list[tuple[str, str]]]:
    """Header lines that hold no listed key, however near they come."""
    wrong = ["", " ", "x", KEY[:-1], KEY + "x", "x" + KEY, KEY.upper(), KEY.title(), KEY * 2, KEY + "\x00", "\x00" + KEY]
    wrong += [f"{KEY},", f"{KEY}, {KEY}", f"{KEY},{OTHER_KEY}", f'"{KEY}"', f"Bearer {KEY}", f"{KEY} {KEY}", f"{KEY};", "*"]
    wrong += [hashlib.sha256(KEY.encode()).hexdigest(), f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}", "vip", "%"]
    wrong += ["x" * 100_000, KEY + " " * 1000 + "x", "\xff" * 64, KEY.replace("-", "\u00ad"), KEY.replace("4711", "4711%00")]
    for value in wrong:
        yield [("X-API-Key", value)]
    for one, other in ((KEY, "x"), ("x", KEY), (KEY, KEY), (KEY, OTHER_KEY), ("", KEY), (KEY, "")):
        yield [("X-API-Key", one), ("x-api-key", other)]
        yield [("X-API-Key", one)] * 10 + [("X-API-KEY", other)] * 10
    for name in ("X-API-Key ", "XAPIKey", "API-Key", "Authorization", "X-API-Key-", "Cookie", "X-API--Key"):
        yield [(name, KEY)]


@attack("API keys that are almost listed, twice in a request, or in the wrong place")
def almost_keys() -> Outcome:
    """Whoever has no listed key is its address, and its tier is the default, however many lines it sends."""
    victims = [Ask([("X-API-Key", KEY)]), Ask([("X-API-Key", OTHER_KEY)])]
    asks = [Ask(lines) for lines in _keys()]
    return all_refused(asks, before=[Ask(peer=VICTIM), Ask()], after=victims, rules=_listing())


@attack("one listed API key in many spellings")
def one_key() -> Outcome:
    """A listed key is one bucket, in whichever encoding and with whatever space around it is sent."""
    outcome = Outcome()
    victims = [Ask([("X-API-Key", OTHER_KEY)])]
    for key in (KEY, UNICODE_KEY):
        spelled = [key, f" {key}", f"{key}\t", _sent(key), f" {_sent(key)} "]
        asks = [
            Ask([(name, value)], peer) for value in spelled for name in ("X-API-Key", "x-api-KEY") for peer in (None, VICTIM)
        ]
        outcome += one_bucket(Ask([("X-API-Key", key)]), asks, victims, rules=_listing())
    return outcome
