"""Forged forwarding headers: whoever lies about its address stays in its own bucket and gets nobody else into trouble."""

from __future__ import annotations

from collections.abc import Iterator

from tests.attacks.world import ATTACKER, INNER, PROXY, TRUSTED, VICTIM, Ask, Outcome, attack, one_bucket

NAMES = [
    "X-Forwarded-For",
    "x-forwarded-for ",
    " x-forwarded-for",
    "X-Forwarded-For-",
    "X--Forwarded-For",
    "Forwarded",
    "Forwarded-For",
    "X-Forwarded",
    "X-Real-IP",
    "X-Client-IP",
    "Client-IP",
    "True-Client-IP",
    "CF-Connecting-IP",
    "Fly-Client-IP",
    "Fastly-Client-IP",
    "X-Cluster-Client-IP",
    "X-Original-Forwarded-For",
    "X-Envoy-External-Address",
    "X-ProxyUser-IP",
    "X-Remote-IP",
    "Remote-Addr",
    "Remote_Addr",
    "Via",
    "Client",
]
"""Names under which somebody somewhere reads an address."""

FORGED = [
    VICTIM,
    f" {VICTIM} ",
    f"{VICTIM}, {VICTIM}",
    f"{VICTIM},",
    f",{VICTIM}",
    f"{VICTIM}:80",
    f"{VICTIM}:99999",
    f"[{VICTIM}]",
    f'"{VICTIM}"',
    f"{VICTIM}%eth0",
    f"::ffff:{VICTIM}",
    f"[::ffff:{VICTIM}]:443",
    f"64:ff9b::{VICTIM}",
    f"::{VICTIM}",
    f"for={VICTIM}",
    f'for="{VICTIM}"',
    f"{VICTIM};{PROXY}",
    f"{VICTIM} {PROXY}",
    f"{VICTIM}\t{PROXY}",
    f"{VICTIM}\x00",
    f"{VICTIM}\xff",
    f"0{VICTIM}",
    f"{VICTIM}/32",
    "3325256711",
    "0xc6.0x33.0x64.0x07",
    "198.51.25607",
    "2001:db8::7",
    "[2001:db8::7]:80",
    "fe80::1%eth0",
    "unknown",
    "_hidden",
    "_gazonk:80",
    "127.0.0.1",
    "::1",
    "0.0.0.0",
    "localhost",
    "unix",
    "None",
    "nobody",
    "nobody,",
    PROXY,
    INNER,
    f"{VICTIM}, {PROXY}",
    f"{VICTIM}, {PROXY}, {INNER}",
    f"{VICTIM}, unknown, {PROXY}",
    f"{PROXY}, {VICTIM}",
    f"{VICTIM}, fd00::1",
    "",
    ",",
    ", , ,",
    " ",
    f"{VICTIM}, " * 2000 + VICTIM,
    f"{PROXY}, " * 2000 + VICTIM,
    "9" * 5000,
    '"' * 5000,
]
"""What a client writes into X-Forwarded-For."""

FORGED_ELEMENTS = [
    f"for={VICTIM}",
    f"For={VICTIM};proto=https",
    f'for="{VICTIM}"',
    f'for="{VICTIM}',
    f'for={VICTIM}"',
    f'for="{VICTIM}\\"',
    f'for="{VICTIM}\\',
    f'for="x, for={VICTIM}',
    f'for="x, for="{VICTIM}", for="',
    f'host=", for={VICTIM}',
    f'host="\\", for={VICTIM}',
    f'host="a,b", for={VICTIM}',
    f'by="{PROXY}',
    f"for={VICTIM};for={PROXY}",
    f"for={VICTIM},",
    f"for={VICTIM};",
    f"for = {VICTIM}",
    f"for={VICTIM} {PROXY}",
    f"for=;for={VICTIM}",
    f'for="[::ffff:{VICTIM}]:80"',
    'for="[2001:db8::7]"',
    "for=[2001:db8::7]",
    'for="\\1\\9\\8.51.100.7"',
    "for=unknown",
    "for=_hidden",
    'for="_hidden:80"',
    f"for={PROXY}",
    f"for={VICTIM}, for={PROXY}",
    f"for={VICTIM}, for=unknown, for={PROXY}",
    VICTIM,
    "",
    ",",
    ";",
    "=",
    '"',
    '""',
    "\\",
    '\\"',
    '"\\',
    '",',
    ',"',
    "for",
    "for=",
    'for="',
    'for=""',
    "\x00",
    "\xff",
    f"for={VICTIM}, " * 2000,
    'for="' * 2000,
    '"\\' * 3000,
]
"""What a client writes into Forwarded."""


def _relayed(name: str, forged: list[str], appended: str) -> Iterator[Ask]:
    """Forged headers as a proxy passes them on, which adds a line of its own or adds to the last one."""
    for value in forged:
        yield Ask([(name, value), (name, appended)], PROXY)
        yield Ask([(name, f"{value}, {appended}")], PROXY)
        yield Ask([(name, value), (name, value), (name, appended)], PROXY)


@attack("forged headers, no proxy trusted")
def without_a_proxy() -> Outcome:
    """A peer that is no trusted proxy is counted by its own address, whatever headers it sends."""
    names = [Ask([(name, VICTIM)]) for name in [*NAMES, "X_Forwarded_For", "x_forwarded_for"]]
    values = [Ask([("X-Forwarded-For", value)]) for value in FORGED] + [Ask([("Forwarded", v)]) for v in FORGED_ELEMENTS]
    outcome = one_bucket(Ask(), [*names, *values], [Ask(peer=VICTIM), Ask(peer="127.0.0.1")])
    trusting = one_bucket(Ask(), values, [Ask(peer=VICTIM)], trusted_proxies=TRUSTED)
    return outcome + trusting + one_bucket(Ask(), values, [Ask(peer=VICTIM)], trusted_proxies=("unix",))


@attack("forged X-Forwarded-For, one proxy")
def through_one_proxy() -> Outcome:
    """What stands to the left of the address that the proxy appended counts for nothing."""
    honest = Ask([("X-Forwarded-For", ATTACKER)], PROXY)
    victims = [Ask([("X-Forwarded-For", VICTIM)], PROXY), Ask([("X-Forwarded-For", "2001:db8::7")], PROXY), Ask(peer=PROXY)]
    forged = _relayed("X-Forwarded-For", FORGED, ATTACKER)
    return one_bucket(honest, forged, victims, trusted_proxies=TRUSTED)


@attack("forged X-Forwarded-For, two proxies")
def through_two_proxies() -> Outcome:
    """The same with a second proxy behind the first one."""
    honest = Ask([("X-Forwarded-For", f"{ATTACKER}, {INNER}")], PROXY)
    victims = [Ask([("X-Forwarded-For", f"{VICTIM}, {INNER}")], PROXY), Ask([("X-Forwarded-For", INNER)], PROXY)]
    forged = [*_relayed("X-Forwarded-For", FORGED, f"{ATTACKER}, {INNER}"), *_relayed("X-Forwarded-For", FORGED, ATTACKER)]
    return one_bucket(honest, forged, victims, trusted_proxies=TRUSTED)


@attack("forged Forwarded, one and two proxies")
def through_forwarded() -> Outcome:
    """Unbalanced quotes, escapes and commas in a forged Forwarded hide nothing that a proxy appended."""
    outcome = Outcome()
    for tail in ("", f", for={INNER}", ';host="a,b"', ';by="_x\\",y"', f';host="a,b", for={INNER};host=",\\""'):
        honest = Ask([("Forwarded", f"for={ATTACKER};proto=https{tail}")], PROXY)
        victims = [Ask([("Forwarded", f'for="{VICTIM}:80"{tail}')], PROXY), Ask([("Forwarded", f"for={INNER}")], PROXY)]
        forged = _relayed("Forwarded", FORGED_ELEMENTS, f"for={ATTACKER};proto=https{tail}")
        outcome += one_bucket(honest, forged, victims, trusted_proxies=TRUSTED, forwarded_header="forwarded")
    return outcome


@attack("another header than the configured one, behind a proxy")
def other_headers_behind_a_proxy() -> Outcome:
    """A proxy passes other headers on as they came; only the configured one is read, if it is there or not."""
    own = ("X-Forwarded-For", ATTACKER)
    named = [name for name in NAMES if name != "X-Forwarded-For"]
    forged = [Ask([(name, VICTIM), own], PROXY) for name in [*named, "X_Forwarded_For"]]
    forged += [Ask([own, (name, VICTIM)], PROXY) for name in named]
    victim = Ask([("X-Forwarded-For", VICTIM)], PROXY)
    outcome = one_bucket(Ask([own], PROXY), forged, [victim], trusted_proxies=TRUSTED)
    without = [Ask([(name, VICTIM)], PROXY) for name in named]
    return outcome + one_bucket(Ask(peer=PROXY), without, [victim], trusted_proxies=TRUSTED)


@attack("forged headers on a unix socket")
def on_a_unix_socket() -> Outcome:
    """A peer without an address is one client, never another one, unless ``unix`` is trusted; then its proxy is believed."""
    everybody = [Ask(peer=peer) for peer in (VICTIM, "127.0.0.1", "::1")]
    forged = [Ask([(name, VICTIM)], None) for name in NAMES] + [Ask([("X-Forwarded-For", value)], None) for value in FORGED]
    outcome = one_bucket(Ask(peer=None), forged, everybody)
    outcome += one_bucket(Ask(peer=None), forged, everybody, trusted_proxies=TRUSTED)
    relayed = [ask._replace(peer=None) for ask in _relayed("X-Forwarded-For", FORGED, ATTACKER)]
    honest, victim = (Ask([("X-Forwarded-For", address)], None) for address in (ATTACKER, VICTIM))
    return outcome + one_bucket(honest, relayed, [victim, *everybody[1:]], trusted_proxies=("unix", *TRUSTED))
