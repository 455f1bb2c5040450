"""One path in many spellings: if a framework's handler ran, it was limited, and by the one bucket there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ipaddress import IPv4Address
from itertools import count
from typing import Any

from limitgate import Rule
from tests.attacks.frameworks import Call, Framework, frameworks
from tests.attacks.world import LIMIT, NOTHING, Outcome, attack

SPELLED = [
    "{p}",
    "/{p}",
    "//{p}",
    "{p}/",
    "{p}//",
    "//{p}//",
    "/.{p}",
    "/./.{p}",
    "{p}/.",
    "{p}/./",
    "/x/..{p}",
    "/x/y/../..{p}",
    "/..{p}",
    "/../..{p}",
    "{p}/x/..",
    "{p}/../{p}",
    "/%2e{p}",
    "/x/%2e%2e{p}",
    "/x/.%2e{p}",
    "/%2e%2e{p}",
    "/%252e{p}",
    "%2f{p}",
    "/%2f{p}",
    "{p}%2f",
    "{p}%2F",
    "{p}%252f",
    "%2F%2F{p}",
    "{p};x",
    "{p};",
    "{p};a=b;c",
    "{p}%3bx",
    "{p}%3B",
    "/;x{p}",
    "/x;/..{p}",
    "/..;{p}",
    "{p};/",
    "{p}/;x",
    "{p}%00",
    "{p}%00.json",
    "/%00{p}",
    "{p}%0a",
    "{p}%0A",
    "{p}%0d",
    "{p}%0d%0a",
    "{p}%0a/",
    "/%0a{p}",
    "{p}%09",
    "{p}%20",
    "{p}+",
    "/%20{p}",
    "{p}%1f",
    "{p}%7f",
    "{p}%c2%85",
    "{p}%85",
    "{p}%ff",
    "{p}%e2%80%a8",
    "{p}%ef%bb%bf",
    "{p}%c0%af",
    "{p}?x",
    "{p}?",
    "{p}??",
    "{p}?/../x",
    "{p}%3f",
    "{p}%23",
    "{p}#x",
    "{p}.",
    "{p}..",
    "{p}.json",
    "{p}/index.html",
    "{p}*",
    "\\{p}",
    "/%5c{p}",
    "/x\\..{p}",
    "http://testserver{p}",
    "http://evil.example{p}",
    "//evil.example{p}",
    "*",
    "",
]
"""Spellings of the path that stands for {p}, as on the request line."""

PATHS = {"login": "/login", "item": "/items/7", "file": "/files/a/b", "marked": "/marked"}


AROUND = ["..", ".", "..;", ";", ";x", "%2e%2e", "x/../..", "%0a", "%0a..", ".%0a.", "%00", ""]
"""Segments that make two interpretations of a path."""


def spellings(path: str) -> list[str]:
    """A path as a client may spell it on the request line."""
    first = f"/%{ord(path[1]):02x}{path[2:]}"
    double = f"/%25{ord(path[1]):02x}{path[2:]}"
    full = "".join(character if character == "/" else f"%{ord(character):02X}" for character in path)
    full_width = "/" + "".join(chr(ord(character) + 0xFEE0) for character in path[1:])
    cases = [path.upper(), path.title(), path.swapcase()]
    return [form.replace("{p}", path) for form in SPELLED] + [first, double, full, full_width, *cases]


RULES: dict[str, list[Rule]] = {
    "login": [Rule("own", LIMIT, path="/login")],
    "item": [Rule("own", LIMIT, path="/items/{id}")],
    "file": [Rule("own", LIMIT, path="/files/**")],
    "everything": [Rule("all", LIMIT)],
    "route": [Rule("all", LIMIT, key=["path", "ip"])],
    "exempted": [
        Rule("own", LIMIT, path="/login"),
        Rule("off", path="/login/{x}", exempt=True),
        Rule("below", path="/x/**", exempt=True),
    ],
    "off the way": [Rule("own", LIMIT, path="/files/**"), Rule("off", path="/login", exempt=True)],
    "below anybody": [Rule("own", LIMIT, path="/by/{who}/login")],
    "marked": [Rule("other", LIMIT, path="/elsewhere")],
}


_peers = (str(IPv4Address(number)) for number in count(int(IPv4Address("100.64.0.0"))))


def tried(framework: Framework, call: Call, plain: str, spelling: str, **more: Any) -> Outcome:
    """A client's first request is the spelling: if it reaches a handler, the plain path does not any more.

    And the other way round for another client: after the plain path the spelling does not reach its handler.
    """
    one, other = next(_peers), next(_peers)
    handler = framework.reached(call, spelling, peer=one, **more)
    if not handler:
        return Outcome(1)
    through = framework.reached(call, plain, peer=one) == handler
    first = framework.reached(call, plain, peer=other)
    through += framework.reached(call, spelling, peer=other, **more) == first
    return Outcome(2, int(through), int(not first))


def _all_tried(framework: Framework, rules: list[Rule], plain: str, spelled: Iterable[str], **more: Any) -> Outcome:
    call = framework.gate(rules)
    return sum((tried(framework, call, plain, spelling, **more) for spelling in spelled), NOTHING)


def _on_each(run: Callable[[Framework], Outcome]) -> Outcome:
    with frameworks() as opened:
        return sum((run(framework) for framework in opened), NOTHING)


@attack("one path in many spellings, on three frameworks")
def one_path() -> Outcome:
    """Whichever spelling of a path reaches its handler, it is charged to the path's bucket."""

    def run(framework: Framework) -> Outcome:
        outcome = _all_tried(framework, RULES["exempted"], "/login", spellings("/login"))
        spelled = [f"/files/{segment}/login{end}" for segment in AROUND for end in ("", "/", ";x", "%0a", "/..")]
        outcome += _all_tried(framework, RULES["off the way"], "/files/a/b", spelled)
        for handler, plain in PATHS.items():
            spelled = [form for form in spellings(plain) if handler != "file" or form.startswith("/files/")]
            for rules in [rules for name, rules in RULES.items() if name in (handler, "everything", "route")]:
                outcome += _all_tried(framework, rules, plain, spelled)
        return outcome

    return _on_each(run)


@attack("one mounted path in many spellings")
def one_mounted_path() -> Outcome:
    """The same below a mount point that the framework has."""

    def run(framework: Framework) -> Outcome:
        spelled = [*spellings("/v1/login"), *("/v1" + form for form in spellings("/login"))]
        outcome = _all_tried(framework, RULES["marked"], "/v1/marked", spellings("/v1/marked"))
        around = [f"/by/{segment}/login{end}" for segment in AROUND for end in ("", "/", ";x", "%0a", "%0a%0a")]
        outcome += _all_tried(framework, RULES["below anybody"], "/by/me/login", around)
        for rules in ([Rule("own", LIMIT, path="/v1/login")], RULES["route"]):
            outcome += _all_tried(framework, rules, "/v1/login", spelled)
        return outcome

    return _on_each(run)


ROOTS = ["/v1", "/v1/", "/login", "/", "/x", "/v1/login", "//", "/;", "/..", "/%2e", "/v1;x", "/logi"]


@attack("a mount point that the server takes off")
def under_a_root() -> Outcome:
    """Whatever stands in root_path or SCRIPT_NAME, a handler that ran was limited."""

    def run(framework: Framework) -> Outcome:
        outcome = NOTHING
        for root in ROOTS:
            is_flask = framework.name == "Flask"
            spelled = [form if is_flask else root + form for form in spellings("/login")]
            outcome += _all_tried(
                framework, RULES["login"], "/login", spelled, **{"SCRIPT_NAME" if is_flask else "root_path": root}
            )
        return outcome

    return _on_each(run)


METHODS = ["GET", "HEAD", "get", "Get", "OPTIONS", "TRACE", "PUT", "X", "GET ", "\xff", "WEBSOCKET"]


@attack("one handler by many methods")
def many_methods() -> Outcome:
    """HEAD is charged as GET, and no method that a framework takes for another one is another one to the rules."""

    def run(framework: Framework) -> Outcome:
        call = framework.gate([Rule("own", LIMIT, path="/login", methods=["GET"], key=["ip", "method"])])
        sent = METHODS[:-1] if framework.name == "Flask" else METHODS
        return sum((tried(framework, call, "/login", "/login", method=method) for method in sent), NOTHING)

    return _on_each(run)
