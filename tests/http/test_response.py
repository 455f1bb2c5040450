from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate import Decision, LimitGateWSGI, MemoryStore, Rule, StoreError
from limitgate.http import rate_fields as styles
from limitgate.http.rate_fields import full_at, rate_fields, raw, raw_x_ratelimit
from tests.support.clock import Clock

START = Clock().now // 1_000_000
"""The whole second at which a fresh clock stands."""
PROBLEMS = "https://iana.org/assignments/http-problem-types#"


class Door:
    """A gate around an application that says yes, on a clock of its own."""

    def __init__(self, *rules: Rule, headers: tuple[str, ...] = ("x-ratelimit",), **options: Any) -> None:
        self.clock = Clock()
        store = options.pop("store", None) or MemoryStore(clock=self.clock)
        self._gate = LimitGateWSGI(_app, rules=list(rules), store=store, headers=headers, **options)
        self.status = ""
        self.lines: list[tuple[str, str]] = []
        self.body = b""
        self.decision: Any = None

    def ask(self, method: str = "GET", path: str = "/", query: str = "", **headers: str) -> Door:
        """Send a request and keep what comes back."""
        environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query, "REMOTE_ADDR": "192.0.2.1"}
        environ |= {f"HTTP_{name.upper()}": value for name, value in headers.items()}
        self.body = b"".join(self._gate(environ, self._start))
        self.decision = environ["limitgate"]
        return self

    def _start(self, status: str, lines: list[tuple[str, str]], exc_info: object = None) -> Any:
        self.status, self.lines = status, lines
        return lambda _: None

    @property
    def fields(self) -> dict[str, str]:
        """The header fields of the answer by lower-case name, none of them there twice."""
        found = {name.lower(): value for name, value in self.lines}
        assert len(found) == len(self.lines)
        return found

    def rate_fields(self) -> dict[str, str]:
        """The fields that tell about rates."""
        return {name: value for name, value in self.fields.items() if "ratelimit" in name}


def _app(_: object, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"yes"]


def parsed_list(text: str) -> list[tuple[str, dict[str, int]]]:
    """A List of Strings with Integer parameters in its canonical form (RFC 9651 sections 3.1, 3.3.3 and 4.1), read strictly."""
    item = r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"((?:;[a-z*][a-z0-9_.*-]*=(?:0|-?[1-9][0-9]{0,14}))*)'
    assert re.fullmatch(rf"{item}(?:, {item})*", text), text
    found = []
    for name, parameters in re.findall(item, text):
        pairs = [pair.split("=") for pair in parameters.split(";")[1:]]
        assert len({key for key, _ in pairs}) == len(pairs)
        found.append((name, {key: int(value) for key, value in pairs}))
    return found


API = Rule("api", qps=5, qpm=100, qpd=2000)


def test_x_ratelimit_is_about_the_tightest_window() -> None:
    """Limit, remaining and the reset as Unix time rounded up, of the window with the least remaining."""
    door = Door(API)
    expected = {"x-ratelimit-limit": "5", "x-ratelimit-remaining": "4", "x-ratelimit-reset": str(START + 1)}
    assert door.ask().rate_fields() == expected
    door.clock.advance(us=800_000)
    # the bucket is full again by then, and after this request it will be at 1.0 s exactly
    assert door.ask().rate_fields() == expected
    door.clock.advance(us=1)
    assert door.ask().rate_fields() == {**expected, "x-ratelimit-remaining": "3", "x-ratelimit-reset": str(START + 2)}


def test_x_ratelimit_goes_over_to_another_window_when_that_is_tighter() -> None:
    """As soon as the minute has less left than the second, the fields are about the minute."""
    door = Door(Rule("api", qps=5, qpm=6))
    for remaining in (4, 3, 2, 1):
        assert door.ask().rate_fields()["x-ratelimit-remaining"] == str(remaining)
        assert door.fields["x-ratelimit-limit"] == "5"
    door.clock.advance(1)
    assert door.ask().rate_fields() == {
        "x-ratelimit-limit": "6",
        "x-ratelimit-remaining": "1",
        "x-ratelimit-reset": str(START + 50),
    }


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (["5/second burst 9", "100/minute"], ("9", "8", START + 1)),
        (["5/second", "5/minute"], ("5", "4", START + 12)),
        (["5/minute", "5/second"], ("5", "4", START + 12)),
        (["3 per 10 minutes"], ("3", "2", START + 200)),
        (["1/day"], ("1", "0", START + 86400)),
        (["1000000/second"], ("1000000", "999999", START + 1)),
    ],
)
def test_x_ratelimit_of_other_limits(limits: list[str], expected: tuple[str, str, int]) -> None:
    """The limit is the burst, and of windows with as much left the one that takes longest to refill counts."""
    fields = Door(Rule("api", *limits)).ask().rate_fields()
    assert (fields["x-ratelimit-limit"], fields["x-ratelimit-remaining"], int(fields["x-ratelimit-reset"])) == expected


def test_x_ratelimit_is_about_all_rules_together() -> None:
    """Of several rules that apply, the one with the least left is told."""
    door = Door(Rule("wide", "100/s"), Rule("narrow", "7/s"), Rule("other", "1/s", path="/other"))
    assert door.ask().rate_fields()["x-ratelimit-limit"] == "7"


def test_x_ratelimit_windows_has_two_fields_per_unit() -> None:
    """Each unit of time has its own limit and remaining."""
    door = Door(Rule("api", qps=5, qpm=100, qph=1000, qpd=2000), headers=("x-ratelimit-windows",))
    assert door.ask().rate_fields() == {
        "x-ratelimit-limit-second": "5",
        "x-ratelimit-remaining-second": "4",
        "x-ratelimit-limit-minute": "100",
        "x-ratelimit-remaining-minute": "99",
        "x-ratelimit-limit-hour": "1000",
        "x-ratelimit-remaining-hour": "999",
        "x-ratelimit-limit-day": "2000",
        "x-ratelimit-remaining-day": "1999",
    }


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([Rule("a", "5 per 15 minutes")], {}),
        ([Rule("a", "5/week")], {}),
        ([Rule("a", "5 per 2 seconds", "9/hour")], {"x-ratelimit-limit-hour": "9", "x-ratelimit-remaining-hour": "8"}),
        ([Rule("a", "5 per 60 seconds")], {"x-ratelimit-limit-minute": "5", "x-ratelimit-remaining-minute": "4"}),
        ([Rule("a", "5 per 24 hours")], {"x-ratelimit-limit-day": "5", "x-ratelimit-remaining-day": "4"}),
        ([Rule("a", "9/s burst 30")], {"x-ratelimit-limit-second": "30", "x-ratelimit-remaining-second": "29"}),
        ([Rule("a", "9/m", "5/m burst 20")], {"x-ratelimit-limit-minute": "9", "x-ratelimit-remaining-minute": "8"}),
        ([Rule("a", "9/m"), Rule("b", "4/m")], {"x-ratelimit-limit-minute": "4", "x-ratelimit-remaining-minute": "3"}),
        ([Rule("b", "4/m"), Rule("a", "9/m")], {"x-ratelimit-limit-minute": "4", "x-ratelimit-remaining-minute": "3"}),
    ],
)
def test_x_ratelimit_windows_of_other_limits(rules: list[Rule], expected: dict[str, str]) -> None:
    """Of several windows of one unit the one with the least left is told, windows of other lengths are left out."""
    assert Door(*rules, headers=("x-ratelimit-windows",)).ask().rate_fields() == expected


def test_draft_11_has_a_policy_and_a_state_per_window() -> None:
    """Every window is a named policy with its count and period, and what is left of it with the seconds until it is full."""
    assert Door(API, headers=("draft-11",)).ask().rate_fields() == {
        "ratelimit-policy": '"api-second";q=5;w=1, "api-minute";q=100;w=60, "api-day";q=2000;w=86400',
        "ratelimit": '"api-second";r=4;t=1, "api-minute";r=99;t=1, "api-day";r=1999;t=44',
    }


@pytest.mark.parametrize(
    ("rules", "policy", "state"),
    [
        ([Rule("api", "5/s")], '"api";q=5;w=1', '"api";r=4;t=1'),
        ([Rule("api", "5/s burst 20")], '"api";q=5;w=1', '"api";r=19;t=1'),
        ([Rule("api", "5 per 15 minutes")], '"api";q=5;w=900', '"api";r=4;t=180'),
        (
            [Rule("api", qph=10, qpd=20)],
            '"api-hour";q=10;w=3600, "api-day";q=20;w=86400',
            '"api-hour";r=9;t=360, "api-day";r=19;t=4320',
        ),
        ([Rule("a", "5/s"), Rule("b", "6/m")], '"a";q=5;w=1, "b";q=6;w=60', '"a";r=4;t=1, "b";r=5;t=10'),
        ([Rule("A-1_x.y", "5/s")], '"A-1_x.y";q=5;w=1', '"A-1_x.y";r=4;t=1'),
        ([Rule("api", "5/s", shadow=True)], '"api";q=5;w=1', '"api";r=4;t=1'),
        ([Rule("api", "5/s", cost=0)], '"api";q=5;w=1', '"api";r=5;t=0'),
        ([Rule("api", "5/s", cost=5)], '"api";q=5;w=1', '"api";r=0;t=1'),
    ],
)
def test_draft_11_of_other_rules(rules: list[Rule], policy: str, state: str) -> None:
    """A rule with one window is a policy of its name; bursts, costs and shadows change what is left and nothing else."""
    fields = Door(*rules, headers=("draft-11",)).ask().rate_fields()
    assert fields == {"ratelimit-policy": policy, "ratelimit": state}


def test_draft_11_tells_windows_of_one_length_apart() -> None:
    """However alike the windows of a rule are, no two have the same name, and each state is that of its policy."""
    door = Door(Rule("api", "5/s", "9/s burst 3", "7 per 15 minutes", "8 per 15 minutes"), headers=("draft-11",))
    fields = door.ask().rate_fields()
    policies, states = parsed_list(fields["ratelimit-policy"]), parsed_list(fields["ratelimit"])
    assert [name for name, _ in policies] == [name for name, _ in states]
    assert len({name for name, _ in policies}) == 4
    assert [(each["q"], each["w"]) for _, each in policies] == [(5, 1), (9, 1), (7, 900), (8, 900)]
    assert [each["r"] for _, each in states] == [4, 2, 6, 7]


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ([Rule("api", qps=5, qpm=9), Rule("api-second", "7/s")], ["api-second-2", "api-minute", "api-second"]),
        ([Rule("api-second", "7/s"), Rule("api", qps=5, qpm=9)], ["api-second", "api-second-2", "api-minute"]),
        ([Rule("api", qps=5, qpm=9), Rule("api-second", qpm=7, qph=9)], ["api-second-2", "api-minute"]),
        ([Rule("api", "5/s", "7/s"), Rule("api-second-2", "7/s")], ["api-second", "api-second-3", "api-second-2"]),
        ([Rule("api", "5 per 2 s", concurrency=5), Rule("api-concurrent", "7/s")], ["api-2s", "api-concurrent-2"]),
        ([Rule("api", qps=5, qpm=9), Rule("api-second", "7/s", path="/other")], ["api-second-2", "api-minute"]),
        ([Rule("api", qps=5, qpm=9), Rule("api-minute", "7/s", tier="vip")], ["api-second", "api-minute-2"]),
    ],
)
def test_draft_11_calls_no_window_like_another_rule(rules: list[Rule], names: list[str]) -> None:
    """A rule's name is that of its own policy; where a window of another rule would be called so, it is not, at any time."""
    fields = Door(*rules, headers=("draft-11",)).ask().rate_fields()
    for field in fields.values():
        found = re.findall(r'"([^"]*)"', field.replace('"concurrent-requests"', ""))
        assert found[: len(names)] == names
        assert len({*found}) == len(found)


def test_a_policy_that_refused_says_when_to_come_back() -> None:
    """In a refusal, t of the refusing policy is its own wait, and of the others still the time until they are full."""
    door = Door(API, Rule("daily", "50/day"), headers=("draft-11",))
    for _ in range(5):
        assert door.ask().status == "200 OK"
    assert door.ask().status == "429 Too Many Requests"
    assert parsed_list(door.fields["ratelimit"]) == [
        ("api-second", {"r": 0, "t": 1}),
        ("api-minute", {"r": 95, "t": 3}),
        ("api-day", {"r": 1995, "t": 216}),
        ("daily", {"r": 45, "t": 8640}),
    ]
    assert door.fields["retry-after"] == "1"


def test_each_refusing_policy_has_its_own_wait() -> None:
    """Where several policies refused, each tells its own wait and Retry-After is the longest."""
    door = Door(Rule("a", "2/minute"), Rule("b", "2/hour"), Rule("c", "9/s"), headers=("draft-11",))
    door.ask()
    door.ask()
    door.ask()
    states = dict(parsed_list(door.fields["ratelimit"]))
    assert (states["a"], states["b"]) == ({"r": 0, "t": 30}, {"r": 0, "t": 1800})
    assert door.fields["retry-after"] == "1800"
    assert json.loads(door.body)["violated-policies"] == ["a", "b"]


def test_a_shadow_that_refused_is_told_but_does_not_refuse() -> None:
    """A shadow rule has its policy and state like any other, and the answer has no Retry-After."""
    door = Door(Rule("real", "9/s"), Rule("shadow", "1/minute", shadow=True), headers=("draft-11", "x-ratelimit"))
    door.ask()
    assert door.ask().status == "200 OK"
    assert dict(parsed_list(door.fields["ratelimit"]))["shadow"] == {"r": 0, "t": 60}
    assert "retry-after" not in door.fields
    assert door.decision.shadow


@pytest.mark.parametrize(
    ("headers", "names"),
    [
        ((), set()),
        (("x-ratelimit",), {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}),
        (("draft-11",), {"ratelimit", "ratelimit-policy"}),
        (
            ("draft-11", "x-ratelimit", "x-ratelimit-windows"),
            {
                "ratelimit",
                "ratelimit-policy",
                "x-ratelimit-limit",
                "x-ratelimit-remaining",
                "x-ratelimit-reset",
                "x-ratelimit-limit-second",
                "x-ratelimit-remaining-second",
            },
        ),
    ],
)
def test_the_chosen_styles_are_sent_with_every_answer(headers: tuple[str, ...], names: set[str]) -> None:
    """Allowed and refused answers have the fields of every chosen style and of no other."""
    door = Door(Rule("api", "1/s"), headers=headers)
    assert set(door.ask().rate_fields()) == names
    assert set(door.ask().rate_fields()) == names
    assert door.status == "429 Too Many Requests"


def test_a_request_under_no_rule_has_no_rate_fields() -> None:
    """Where nothing is limited, nothing is told."""
    door = Door(
        Rule("api", "1/s", path="/api/**"), Rule("free", path="/free", exempt=True), headers=("x-ratelimit", "draft-11")
    )
    for path in ("/", "/free"):
        assert door.ask(path=path).lines == [("Content-Type", "text/plain")]
        assert door.decision is None


def test_a_refusal_is_a_problem() -> None:
    """A refusal has everything that caches, clients and people need to know."""
    door = Door(Rule("login", "5/minute burst 3"), Rule("api", "9/s"))
    for _ in range(3):
        door.ask()
    door.ask("POST")
    assert door.status == "429 Too Many Requests"
    assert door.fields | {"content-length": "?"} == {
        "content-type": "application/problem+json",
        "content-length": "?",
        "cache-control": "no-store",
        "retry-after": "12",
        "x-ratelimit-limit": "3",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": str(START + 36),
    }
    assert door.fields["content-length"] == str(len(door.body))
    problem = json.loads(door.body)
    assert isinstance(problem.pop("detail"), str)
    assert problem.pop("instance").startswith("urn:limitgate:refusal:")
    assert problem == {
        "type": f"{PROBLEMS}quota-exceeded",
        "title": "Quota Exceeded",
        "status": 429,
        "violated-policies": ["login"],
    }


def test_only_rules_that_refused_are_violated() -> None:
    """Rules that had room, and shadow rules that had none, are not named."""
    door = Door(Rule("wide", "99/s"), Rule("shadow", "1/s", shadow=True), Rule("b", "1/m"), Rule("a", "1/h"))
    door.ask()
    assert json.loads(door.ask().body)["violated-policies"] == ["b", "a"]


def test_head_has_the_fields_and_no_body() -> None:
    """A refused HEAD is answered like a GET, without the body."""
    door = Door(Rule("api", "1/s"))
    door.ask()
    get, body = door.ask().fields, door.body
    head = door.ask("HEAD").fields
    assert door.status == "429 Too Many Requests"
    assert head == get
    assert body
    assert door.body == b""


@pytest.mark.parametrize(
    ("limit", "after", "expected"),
    [
        ("1/s", 0, "1"),
        ("1000/s burst 1", 0, "1"),
        ("1000000/s burst 1", 0, "1"),
        ("1/s", 0.999_999, "1"),
        ("1/minute", 0, "60"),
        ("1/minute", 0.000_001, "60"),
        ("1/minute", 1, "59"),
        ("1/minute", 58.999_999, "2"),
        ("1/minute", 59, "1"),
        ("1/minute", 59.999_999, "1"),
        ("7/minute burst 1", 0, "9"),
        ("1/day", 0, "86400"),
        ("1 per 366 days", 0, "31622400"),
    ],
)
def test_retry_after_is_whole_seconds_rounded_up(limit: str, after: float, expected: str) -> None:
    """Retry-After is digits alone, at least 1, and never before the request would fit."""
    door = Door(Rule("api", limit))
    assert door.ask().status == "200 OK"
    assert "retry-after" not in door.fields
    door.clock.advance(after)
    assert door.ask().fields["retry-after"] == expected


def test_retry_after_is_missing_if_waiting_cannot_help() -> None:
    """A cost above the burst can never pass, so no time to come back is told."""
    rule = Rule("api", "5/s", "9/minute", cost=lambda request: int(request.query.get("n", "1")))
    door = Door(rule, headers=("x-ratelimit", "draft-11"))
    assert door.ask(query="n=6").status == "429 Too Many Requests"
    assert "retry-after" not in door.fields
    assert math.isinf(door.decision.retry_after)
    states = dict(parsed_list(door.fields["ratelimit"]))
    assert "t" not in states["api-second"]
    assert states["api-minute"] == {"r": 9, "t": 0}
    assert "Infinity" not in door.body.decode()
    assert door.ask(query="n=5").status == "200 OK"


limits = st.builds(
    "{}/{} burst {}".format, st.integers(1, 40), st.sampled_from(["s", "minute", "hour", "7 seconds"]), st.integers(1, 9)
).map(lambda text: re.sub(r"(\d+)/(\d+ \w+)", r"\1 per \2", text))


@given(
    st.lists(st.tuples(limits, st.booleans()), min_size=1, max_size=3),
    st.lists(st.integers(0, 3_000_000), min_size=1, max_size=12),
)
def test_retry_after_waited_for_is_always_enough_property(drawn: list[tuple[str, bool]], pauses: list[int]) -> None:
    """A refused client that waits Retry-After gets through, a second less would not do, and no refusing policy's t is later."""
    rules = [Rule(f"r{place}", limit, shadow=shadow) for place, (limit, shadow) in enumerate(drawn)]
    door = Door(*rules, headers=("draft-11", "x-ratelimit"))
    for pause in pauses:
        door.clock.advance(us=pause)
        for _ in range(10):
            door.ask()
            states = dict(parsed_list(door.fields["ratelimit"]))
            policies = dict(parsed_list(door.fields["ratelimit-policy"]))
            assert list(states) == list(policies) == [rule.name for rule in rules]
            assert all(state["r"] >= 0 and state["t"] >= 0 for state in states.values())
            real = [rule.name for rule in rules if not rule.shadow] or list(states)
            assert min(states[name]["r"] for name in real) == int(door.fields["x-ratelimit-remaining"])
            if door.status != "200 OK":
                break
        else:
            continue
        told = int(door.fields["retry-after"])
        assert told >= 1
        refused = json.loads(door.body)["violated-policies"]
        assert refused
        assert max(states[name]["t"] for name in refused) == told
        before = door.clock.now
        door.clock.advance(told - 1)
        assert door.ask().status == "429 Too Many Requests"
        door.clock.now = before
        door.clock.advance(told)
        assert door.ask().status == "200 OK"


HOSTILE = 'evil"\\,;=\u00e9<script>'


def test_refusal_contains_nothing_that_the_client_sent() -> None:
    """Neither fields nor body repeat a path, a header, an address or a key of the request."""
    rule = Rule("api", "1/minute", key=["header:x-id", "host", "path", "ip", "api_key", "method"])
    door = Door(rule, headers=("x-ratelimit", "x-ratelimit-windows", "draft-11"))
    for _ in range(2):
        door.ask(
            method="EVIL", path=f"/{HOSTILE}", query=HOSTILE, x_id=HOSTILE, host=HOSTILE, x_api_key=HOSTILE, user_agent=HOSTILE
        )
        told = "".join(f"{name}: {value}\n" for name, value in door.lines) + door.body.decode()
        assert "evil" not in told.lower()
        assert "192.0.2.1" not in told
        for name, value in door.lines:
            assert re.fullmatch(r"[A-Za-z0-9-]+", name)
            assert re.fullmatch(r"[\x20-\x7e]+", value)
    assert door.status == "429 Too Many Requests"


def test_every_refusal_tells_of_its_own_rules_and_wait() -> None:
    """A refusal is the same as one before it only where the same rules refuse for as long, whatever became of that one."""
    door = Door(Rule("all", "2/minute"), Rule("login", "1/minute", path="/login"))
    told = []
    for path in ("/login", "/login", "/", "/login", "/", "/login", "/"):
        door.ask(path=path)
        if door.status != "200 OK":
            told.append((json.loads(door.body)["violated-policies"], door.fields["retry-after"]))
            door.lines.clear()
            door.clock.advance(0.5)
    assert told == [
        (["login"], "60"),
        (["all", "login"], "60"),
        (["all"], "29"),
        (["all", "login"], "59"),
        (["all"], "28"),
    ]


class Broken:
    """A store that never answers."""

    def spend(self, plan: Any, timeout: float) -> Any:
        raise StoreError("gone")

    def close(self) -> None:
        """Nothing to let go of."""


def test_on_error_closed_answers_503_and_not_429() -> None:
    """Where the store failed and the rule is closed, the answer is a 503 of its own type, without rate fields."""
    door = Door(Rule("api", "5/s", on_error="closed"), headers=("x-ratelimit", "draft-11"), store=Broken())
    assert door.ask().status == "503 Service Unavailable"
    assert int(door.fields["retry-after"]) >= 1
    assert door.rate_fields() == {}
    assert (door.fields["content-type"], door.fields["cache-control"]) == ("application/problem+json", "no-store")
    assert door.fields["content-length"] == str(len(door.body))
    problem = json.loads(door.body)
    assert isinstance(problem.pop("detail"), str)
    kind = {"type": f"{PROBLEMS}temporary-reduced-capacity", "title": "Temporary Reduced Capacity", "status": 503}
    assert problem.items() >= kind.items()
    assert (door.decision.allowed, door.decision.degraded) == (False, True)


def test_on_error_open_sends_no_rate_fields() -> None:
    """Where the store failed and requests pass, no fields are made up."""
    door = Door(Rule("api", "5/s", on_error="open"), headers=("x-ratelimit", "draft-11"), store=Broken())
    assert door.ask().lines == [("Content-Type", "text/plain")]
    assert (door.decision.allowed, door.decision.degraded) == (True, True)


def test_a_gate_on_its_own_tells_what_it_knows() -> None:
    """Where this process limits alone, the fields are about its own buckets."""
    door = Door(Rule("api", "5/hour", on_error="local"), store=Broken())
    assert [door.ask().fields["x-ratelimit-remaining"] for _ in range(5)] == ["4", "3", "2", "1", "0"]
    assert door.ask().status == "429 Too Many Requests"
    assert door.decision.degraded


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 10**6)), max_size=20))
def test_fields_for_asgi_are_those_for_wsgi_property(numbers: list[tuple[int, int, float]]) -> None:
    """Fields that are made as bytes are the encoded text ones."""
    for limit, left, reset in numbers:
        decision = Decision(True, limit, left, 0.0, reset, 1, "api")
        fields = raw_x_ratelimit(limit, left, full_at(decision, START))
        assert fields == raw(rate_fields(["x-ratelimit"], decision, START))


def test_rate_fields_cache_with_many_values_stays_bounded() -> None:
    """However many numbers responses have, few are remembered; those that are forgotten are made anew."""
    for left in (*range(1, 5000), 1, 4999):
        assert [value for _, value in raw_x_ratelimit(left, left, left * 1_000_000)] == [b"%d" % left] * 3
    assert all(len(each) <= 1024 for each in (styles._RAW_LIMIT, styles._RAW_REMAINING, styles._RAW_RESET))
