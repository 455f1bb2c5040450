"""Bytes to begin with, and ways to make others out of them: for fuzzing without a view of the code."""

from __future__ import annotations

import random
from urllib.parse import unquote_to_bytes

from tests.attacks.addresses import V4_SPELLINGS, V6_SPELLINGS
from tests.attacks.forwarding import FORGED, FORGED_ELEMENTS
from tests.attacks.paths import spellings
from tests.attacks.values import HOSTS, LIKE_K, PAIRS, RAW

LONGEST = 4096
ROUTED = [
    *(
        "/login",
        "/v1/login",
        "/items/7",
        "/of/x/items/7",
        "/v1/deep/items/7",
        "/v1/items/7",
        "/of/x/login",
        "/f/a/b",
        "/v1/f/a",
    ),
    *(
        "/u/6f1d2a3b-0000-4000-8000-0123456789ab/1.5",
        "/a/b/z",
        "/last/x",
        "/any/a",
        "/",
        "x/login",
        "/v1",
        "/v1/",
        "/sub/login",
    ),
]
"""Paths that lead somewhere in the applications that are fuzzed."""

TOKENS = [
    *(character.encode() for character in "/.;,\"\\=:[]%?#&*{}|-_~^`'()<>@"),
    *(b"//", b"/../", b"/./", b";x", b"%2e", b"%2f", b"%00", b"%0a"),
    *(
        b"\x00",
        b"\n",
        b"\r\n",
        b"\t",
        b" ",
        b"\x7f",
        b"\x85",
        b"\xa0",
        b"\xff",
        b"\xfe",
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"\xe2\x80\xa8",
    ),
    *(
        b"for=",
        b'for="',
        b"by=",
        b"host=",
        b"proto=https",
        b"unknown",
        b"_hidden",
        b"10.0.0.1",
        b"203.0.113.9",
        b"[::1]",
        b":80",
    ),
    *(b"::ffff:", b"64:ff9b::", b"%eth0", b"0x", b"1.2.3", b"255", b"999", b"2001:db8::1", b"fd00::1", b"127.0.0.1"),
    *(b"/login", b"/items/", b"/v1", b"/f/", b"/of/", b"/healthz", b"/chat", b"9" * 20, b"-1", b"1e9", b"\xd9\xa1"),
    *(b"x-forwarded-for:", b"forwarded:", b"host:", b"x-api-key:", b"authorization: Bearer ", b"x-a:", b"content-length:"),
    *(
        b"demo-vip-key",
        b"billing",
        b"Bearer ",
        b"bearer",
        b"GET\xfe",
        b"OPTIONS\xfe",
        b"origin: x\naccess-control-request-method: y",
    ),
    b"\xfe/login\xfe\xfe",
]


def corpus() -> list[bytes]:
    """What the tables of attacks are made of, as bytes."""
    texts = [
        *V4_SPELLINGS,
        *V6_SPELLINGS,
        *FORGED,
        *FORGED_ELEMENTS,
        *spellings("/login"),
        *spellings("/items/7"),
        *HOSTS,
        *LIKE_K,
    ]
    texts += [part for pair in PAIRS for part in pair]
    paths = [*ROUTED, *(form for path in ROUTED[:4] for form in spellings(path))]
    texts += paths
    found = [text.encode("utf-8", "surrogatepass")[:LONGEST] for text in texts] + RAW
    requests = [
        b"GET\xfe" + path.encode() + b"\xfea=b\xfehost: a.example\nx-api-key: demo-vip-key" for path in spellings("/login")
    ]
    return [*dict.fromkeys([*found, *map(unquote_to_bytes, paths), *requests, *TOKENS])]


def mutated(chosen: random.Random, seeds: list[bytes]) -> bytes:
    """One of the seeds after a few changes: tokens put in, pieces cut out, repeated, flipped, or another seed appended."""
    data = chosen.choice(seeds)
    for _ in range(chosen.randrange(5)):
        kind, at = chosen.randrange(8), chosen.randrange(len(data) + 1)
        if kind <= 2:
            data = data[:at] + chosen.choice(TOKENS) + data[at:]
        elif kind == 3:
            data = data[:at] + data[at + chosen.randrange(1, 9) :]
        elif kind == 4:
            piece = data[at : at + chosen.randrange(1, 9)]
            data = data[:at] + piece * chosen.choice((2, 3, 9, 40)) + data[at:]
        elif kind == 5:
            data = data[:at] + bytes([chosen.randrange(256)]) + data[at + 1 :]
        elif kind == 6:
            data = data[:at] + chosen.choice(seeds)
        else:
            data = data[:at] + chosen.randbytes(chosen.randrange(1, 9)) + data[at:]
    return data[:LONGEST]
