"""One client by many addresses: however an address is spelled, it is one client."""

from __future__ import annotations

import random

from tests.attacks.world import PROXY, TRUSTED, Ask, Outcome, attack, one_bucket

V4 = "192.0.2.1"
V4_SPELLINGS = [
    V4,
    f" {V4}",
    f"{V4} ",
    f"\t{V4}\t",
    f"{V4}:1",
    f"{V4}:0",
    f"{V4}:65535",
    f"{V4}:99999",
    f"[{V4}]",
    f"[{V4}]:8080",
    f"{V4}%eth0",
    f"::ffff:{V4}",
    f"::FFFF:{V4}",
    f"::fFfF:{V4}",
    f"0::ffff:{V4}",
    f"0:0:0:0:0:ffff:{V4}",
    f"0000:0000:0000:0000:0000:ffff:{V4}",
    f"0:0::0:ffff:{V4}",
    "::ffff:c000:201",
    "::ffff:C000:0201",
    "::ffff:c000:0201",
    "0:0:0:0:0:ffff:c000:201",
    "0000:0000:0000:0000:0000:ffff:c000:0201",
    f"[::ffff:{V4}]",
    f"[::ffff:{V4}]:80",
    f"::ffff:{V4}%eth0",
    f"[::ffff:{V4}%1]:80",
    f"64:ff9b::{V4}",
    f"64:FF9B::{V4}",
    f"0064:ff9b::{V4}",
    f"64:ff9b:0:0:0:0:{V4}",
    "64:ff9b::c000:201",
    "64:ff9b::c000:0201",
    "0064:ff9b:0000:0000:0000:0000:c000:0201",
    f"[64:ff9b::{V4}]",
    f"[64:ff9b::{V4}]:443",
    f"64:ff9b::{V4}%0",
]

V6 = "2001:db8:1:2::1"
V6_SPELLINGS = [
    V6,
    "2001:DB8:1:2::1",
    "2001:0db8:0001:0002::0001",
    "2001:db8:1:2:0:0:0:1",
    "2001:0DB8:0001:0002:0000:0000:0000:0001",
    "2001:db8:1:2:0::1",
    "2001:db8:1:2::0:1",
    "2001:db8:1:2::0.0.0.1",
    "2001:db8:1:2:0:0:0.0.0.1",
    f"{V6}%eth0",
    f"{V6}%25eth0",
    f"{V6}%",
    f"[{V6}]",
    f"[{V6}]:80",
    f"[{V6}%eth0]:80",
    f" {V6} ",
    "2001:db8:1:2::",
    "2001:db8:1:2::2",
    "2001:db8:1:2:ffff:ffff:ffff:ffff",
    "2001:db8:1:2::192.0.2.1",
    "2001:db8:1:2:a:b:c:d",
]

STRANGERS = ["192.0.2.2", "2001:db8:1:3::1", "::ffff:192.0.2.3", "64:ff9b::192.0.2.4", "127.0.0.1", "::1"]


def _neighbours(count: int) -> list[str]:
    """Addresses of one /64, as a client with a network of its own may take them."""
    chosen = random.Random(0)
    return ["2001:db8:1:2:" + ":".join(f"{chosen.getrandbits(16):x}" for _ in range(4)) for _ in range(count)]


@attack("one address in many spellings")
def one_address() -> Outcome:
    """Ports, brackets, zones, cases, zeros, and IPv4 in IPv6 clothes make no second client, and no two clients one."""
    outcome = Outcome()
    for own, spellings in ((V4, V4_SPELLINGS), (V6, [*V6_SPELLINGS, *_neighbours(20)])):
        strangers = [Ask(peer=stranger) for stranger in STRANGERS]
        outcome += one_bucket(Ask(peer=own), [Ask(peer=spelling.strip()) for spelling in spellings], strangers)
        for header, form in (("x-forwarded-for", "{}"), ("forwarded", 'for="{}"')):
            asks = [Ask([(header, form.format(spelling))], PROXY) for spelling in spellings]
            outcome += one_bucket(Ask(peer=own), asks, strangers, trusted_proxies=TRUSTED, forwarded_header=header)
    return outcome
