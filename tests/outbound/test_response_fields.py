"""What other services say about their limits, as real ones say it and as no one should."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate import LimitGateWSGI, MemoryStore, Rule
from limitgate.http.rate_fields import STYLES
from limitgate.outbound import response_fields
from limitgate.outbound.response_fields import LONGEST, Answer, answer_of
from tests.support.clock import Clock
from tests.support.doors import wsgi_reply
from tests.support.effort import EXAMPLES

NOW = 1_790_000_000
HTTP_DATE = formatdate(NOW + 90, usegmt=True)
NEW_YEAR = 1_798_761_600 - NOW


def heard(status: int = 429, **fields: str) -> Answer:
    """What a response says with these fields, ``_`` for ``-``."""
    return answer_of(status, {name.replace("_", "-"): value for name, value in fields.items()}.get, NOW)


# --- Retry-After ------------------------------------------------------------------------------------------------------

RETRY_AFTER: list[tuple[str, float | None]] = [
    ("120", 120),
    (" 120 ", 120),
    ("0", 0),
    ("2.0", 2),  # Shopify
    ("0.35", 0.35),
    (HTTP_DATE, 90),
    ("Sun, 21 Sep 2026 14:14:50 GMT", 90),  # a Monday, in truth
    ("Monday, 21-Sep-26 14:14:50 GMT", 90),  # RFC 850
    ("Mon Sep 21 14:14:50 2026", 90),  # asctime
    ("Mon, 21 Sep 2026 16:14:50 +0200", 90),
    (formatdate(NOW - 90, usegmt=True), 0),
    (str(NOW + 90), 90),  # Unix time, where seconds should be
    (str((NOW + 90) * 1000), 90),
    (str(NOW - 90), 0),
    ("999999999", LONGEST),
    ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST),
    *[("9" * digits, LONGEST) for digits in (15, 16, 400, 4096)],
    (f"{'9' * 16}.{'9' * 16}", LONGEST),
    ("0." + "3" * 20, 1 / 3),
    ("0" * 20 + "5", 5),
    ("9" * 5000, None),  # no field of more than 4 KB is read
    ("-5", None),
    ("+5", None),
    ("1e308", None),
    ("nan", None),
    ("inf", None),
    ("5.", None),
    (".5", None),
    ("5 s", None),
    ("Sun, 31 Dec 2023 23:59:60 GMT", 0),  # leap seconds
    ("Thu, 31 Dec 2026 23:59:60 GMT", NEW_YEAR),
    ("Thursday, 31-Dec-26 23:59:60 GMT", NEW_YEAR),
    ("Thu Dec 31 23:59:60 2026", NEW_YEAR),
    ("Fri, 01 Jan 2027 01:59:60 +0200", NEW_YEAR),
    ("Thu, 31 Dec 2026 23:59:61 GMT", None),
    ("Thu, 31 Dec 2026 23:60:00 GMT", None),
    ("Thu, 31 Dec 2026 24:00:00 GMT", None),
    ("Sun, 30 Feb 2027 00:00:00 GMT", None),
    ("5, 5", 5),  # two lines
    ("5,30", 30),
    ("30, 5 ,\t7", 30),
    ("5, ", 5),
    (" ,5", 5),
    ("5, soon", 5),
    ("soon, 5", 5),
    ("-5, 5", 5),
    (", ", None),
    ("soon, later", None),
    (f"{HTTP_DATE}, 30", 90),
    (f"120, {HTTP_DATE}", 120),
    (f"{HTTP_DATE}, {formatdate(NOW + 95, usegmt=True)}", 95),
    ("Monday, 21-Sep-26 14:14:50 GMT, Mon Sep 21 14:14:51 2026, Mon, 21 Sep 2026 14:14:52 GMT", 92),
    (f"soon, {HTTP_DATE}, Mon, 32 Sep 2026 14:14:50 GMT", 90),
    ("Mon, 5", None),
    ("1m30s", None),
    ("\u0665", None),
    ("", None),
    ("soon", None),
    ("2026-09-21T14:14:50Z", None),
    ("Mon, 32 Sep 2026 14:14:50 GMT", None),
    ("Mon, 21 Sep 2026 14:14:50 +9999", None),
    ("Mon, 21 Sep 2026 14:14:50 +99999999999999999", None),
    ("Mon, 21 Sep 99999 14:14:50 GMT", None),
]


@pytest.mark.parametrize(("value", "wait"), RETRY_AFTER, ids=[value[:50] for value, _ in RETRY_AFTER])
def test_retry_after_in_all_its_forms(value: str, wait: float | None) -> None:
    """Seconds, a date in one of HTTP's three forms, or Unix time; anything else is ignored."""
    assert heard(retry_after=value).retry_after == wait


@pytest.mark.parametrize(
    ("status", "is_heard"), [(200, False), (202, False), (301, False), (403, True), (429, True), (503, True)]
)
def test_retry_after_of_what_is_no_error_is_about_something_else(status: int, *, is_heard: bool) -> None:
    """A 202 or a redirect says when to look again for something, not that it was too much (RFC 9110 section 10.2.3)."""
    assert heard(status, retry_after="5") == Answer(status, 5 if is_heard else None)


def test_only_a_429_is_refused() -> None:
    """Other errors that name a wait are no refusals of a limit."""
    assert [status for status in range(200, 600) if heard(status, retry_after="5").refused] == [429]


# --- fields about what is left ----------------------------------------------------------------------------------------

LEFT: list[tuple[str, dict[str, str], float | None]] = [
    ("draft 11", {"ratelimit": '"default";r=0;t=5'}, 5),
    ("draft 11, some left", {"ratelimit": '"default";r=1;t=5'}, None),
    ("the draft after 11", {"ratelimit": '"default";a=0;w=5'}, 5),
    ("the draft after 11, with room", {"ratelimit": '"default";a=3;w=5'}, None),
    ("draft 11, several", {"ratelimit": '"burst";r=0;t=1, "daily";r=0;t=36400, "hourly";r=3;t=90000'}, 36400),
    ("draft 11, nobody knows until when", {"ratelimit": '"default";r=0'}, None),
    ("draft 11, one of two does not know", {"ratelimit": '"a";r=0, "b";r=0;t=7'}, 7),
    ("draft 11, partition", {"ratelimit": '"a";r=0;t=7;pk=:c2VjcmV0:'}, 7),
    ("draft 11, other parameters", {"ratelimit": '"a";vendor=1.5;r=0;t=7;q'}, 7),
    ("draft 11, odd names", {"ratelimit": r'"a, b;r=5;t=9 \"c\\";r=0;t=7'}, 7),
    ("draft 11, for a century", {"ratelimit": '"a";r=0;t=3162240000'}, LONGEST),
    ("express-rate-limit, draft-8", {"ratelimit": '"5-in-10sec"; r=0; t=8', "ratelimit-policy": '"5-in-10sec"; q=5; w=10'}, 8),
    ("express-rate-limit, draft-7", {"ratelimit": "limit=5, remaining=0, reset=8", "ratelimit-policy": "5;w=10"}, 8),
    ("draft 07, some left", {"ratelimit": "limit=5, remaining=2, reset=8"}, None),
    ("draft 07, another order", {"ratelimit": "reset=8,remaining=0,limit=5"}, 8),
    ("express-rate-limit, draft-6", {"ratelimit-limit": "5", "ratelimit-remaining": "0", "ratelimit-reset": "8"}, 8),
    ("draft 03", {"ratelimit-limit": "5, 5;w=10", "ratelimit-remaining": "0", "ratelimit-reset": "8"}, 8),
    ("rack-attack", {"ratelimit-remaining": "0", "ratelimit-reset": str(NOW + 30)}, 30),
    ("GitHub", {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(NOW + 1800), "x-ratelimit-used": "60"}, 1800),
    ("GitHub, some left", {"x-ratelimit-remaining": "59", "x-ratelimit-reset": str(NOW + 1800)}, None),
    ("X", {"x-rate-limit-limit": "15", "x-rate-limit-remaining": "0", "x-rate-limit-reset": str(NOW + 900)}, 900),
    (
        "Discord",
        {"x-ratelimit-remaining": "0", "x-ratelimit-reset": f"{NOW + 9}.521", "x-ratelimit-reset-after": "1.25"},
        1.25,
    ),
    ("Discord's fraction", {"x-ratelimit-remaining": "0", "x-ratelimit-reset": f"{NOW + 1}.5"}, 1.5),
    ("Reddit", {"x-ratelimit-remaining": "0.0", "x-ratelimit-reset": "287", "x-ratelimit-used": "100"}, 287),
    ("Reddit, a part left", {"x-ratelimit-remaining": "0.5", "x-ratelimit-reset": "287"}, None),
    ("milliseconds", {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str((NOW + 3) * 1000)}, 3),
    ("long ago", {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(NOW - 1800)}, 0),
    ("in a century", {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(NOW + 100 * 366 * 86_400)}, LONGEST),
    ("31 years", {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "999999999"}, LONGEST),
    ("SendGrid", {"x-ratelimit-limit": "600", "x-ratelimit-remaining": "0", "x-ratelimit-reset": str(NOW + 21)}, 21),
    ("OpenAI", {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, None),
    ("Shopify", {"x-shopify-shop-api-call-limit": "40/40"}, None),
    ("Stripe", {"stripe-rate-limited-reason": "global-rate"}, None),
    ("of proxy and service", {"x-ratelimit-remaining": "0, 3", "x-ratelimit-reset": "7, 50"}, 7),
    ("of both, exhausted", {"ratelimit-remaining": "0,0", "ratelimit-reset": f"7,{NOW + 50}"}, 50),
    ("of both, some left", {"x-ratelimit-remaining": "2, 3", "x-ratelimit-reset": "7, 50"}, None),
    ("nobody knows whose", {"x-ratelimit-remaining": "0, 0", "x-ratelimit-reset": "7"}, None),
    ("too many digits", {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1" * 30}, LONGEST),
    ("no reset", {"x-ratelimit-remaining": "0"}, None),
    ("no remaining", {"x-ratelimit-reset": str(NOW + 21)}, None),
]


@pytest.mark.parametrize(("fields", "wait"), [each[1:] for each in LEFT], ids=[each[0] for each in LEFT])
def test_what_others_say_is_left(fields: dict[str, str], wait: float | None) -> None:
    """The drafts since 03, and what is sent without any standard."""
    for status in (200, 429):
        assert answer_of(status, fields.get, NOW) == Answer(status, None, wait)


MALFORMED = [
    '"default";r=-1;t=5',
    '"default";r=0;t=-5',
    '"default";r=0.0;t=5',
    '"default";r=0;t=5.5',
    '"default";r="0";t=5',
    '"default";r;t=5',
    '"default";t=5',
    "default;r=0;t=5",
    "5;r=0;t=5",
    '("a" "b");r=0;t=5',
    '"default";r=0;t=5,',
    '"default";r=0;t=5 "x"',
    '"default;r=0;t=5',
    '"défaut";r=0;t=5',
    '"default";r=0;t=9999999999999999',
    f'"default";r=0;t={"9" * 5000}',
    '"default";r=0;t=@99999999999999',
    "limit=5, remaining=0",
    "limit=5, remaining=-1, reset=5",
    "limit=5, remaining=0, reset=5.5",
    "limit=5, remaining=0, reset=?1",
    "limit=5, remaining=(0), reset=5",
    "0",
    "",
    ",",
    "(" * 3000,
    "\x00",
    "\u20ac",
]


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: ascii(value)[:30])
def test_what_is_malformed_is_ignored_and_the_next_is_read(value: str) -> None:
    """No part of a malformed field is believed (the draft's section 7)."""
    assert heard(ratelimit=value).exhausted is None
    assert heard(ratelimit=value, x_ratelimit_remaining="0", x_ratelimit_reset="9").exhausted == 9


@pytest.mark.parametrize("value", ["-1", "1e308", "nan", "0x10", "5, 6", "5,", "", "6m0s", "2026-09-21T14:14:50Z"])
def test_a_number_that_is_none_is_ignored(value: str) -> None:
    """Of what is left, and of when there is more."""
    assert heard(x_ratelimit_remaining="0", x_ratelimit_reset=value).exhausted is None
    assert heard(x_ratelimit_remaining=value, x_ratelimit_reset="9").exhausted is None


def test_retry_after_takes_precedence() -> None:
    """It is believed whatever the other fields say (the draft's section 7); without it they are."""
    fields = {"ratelimit": '"default";r=0;t=50'}
    assert heard(retry_after="5", **fields).pause == 5
    assert heard(retry_after="0", **fields).pause == 0
    assert heard(retry_after="soon", **fields).pause == 50
    assert heard(200, retry_after="5", **fields).pause == 50
    assert heard().pause is None


def test_the_newest_of_the_fields_is_believed() -> None:
    """A service that sends several generations of fields means the same; the first of them that says what is left decides."""
    old = {"x_ratelimit_remaining": "0", "x_ratelimit_reset": "9"}
    assert heard(ratelimit='"default";r=3;t=50', **old).exhausted is None
    assert heard(ratelimit_remaining="3", ratelimit_reset="50", **old).exhausted is None
    assert heard(ratelimit_remaining="0", ratelimit_reset="50", **old).exhausted == 50


# --- clocks and caches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", [-86_400, -60, -3, 3, 60, 86_400])
def test_a_time_is_by_the_clock_of_who_says_it(skew: float) -> None:
    """Where the other side's clock differs from ours, it counts from its own ``Date``."""
    date = formatdate(NOW + skew, usegmt=True)
    assert heard(date=date, retry_after=formatdate(NOW + skew + 90, usegmt=True)).retry_after == 90
    assert heard(date=f"{date}, {date}", retry_after=formatdate(NOW + skew + 90, usegmt=True)).retry_after == 90
    assert heard(date=date, x_ratelimit_remaining="0", x_ratelimit_reset=f"{NOW + skew + 90}").exhausted == 90


@pytest.mark.parametrize("date", [formatdate(NOW - 2, usegmt=True), formatdate(NOW + 2, usegmt=True), "today", ""])
def test_a_clock_that_is_hardly_apart_is_ours(date: str) -> None:
    """A ``Date`` is in whole seconds and has travelled, so ours is the finer one; and it is all we have without theirs."""
    assert heard(date=date, retry_after=HTTP_DATE).retry_after == 90


def test_seconds_need_no_clock() -> None:
    """What is not a time is the same by any clock."""
    date = formatdate(NOW - 86_400, usegmt=True)
    assert heard(date=date, retry_after="5", ratelimit='"default";r=0;t=50') == Answer(429, 5, 50)


@pytest.mark.parametrize(
    ("age", "exhausted"), [("1", None), ("3600", None), ("0, 7", None), ("0", 50), ("0, 0", 50), ("", 50), ("old", 50)]
)
def test_what_a_cache_says_of_limits_is_past(age: str, exhausted: float | None) -> None:
    """Fields of a response that has been stored are ignored (the draft's section 7.3); ``Age: 0`` comes from caches, too."""
    assert heard(age=age, retry_after="5", ratelimit='"default";r=0;t=50') == Answer(429, 5, exhausted)


# --- anything ---------------------------------------------------------------------------------------------------------

PIECES = [
    "0",
    "5",
    "1790000090",
    "-",
    ".",
    "e9",
    ",",
    ";",
    "=",
    '"a"',
    "r=0",
    "t=5",
    "remaining=0",
    "reset=5",
    ":",
    "@",
    "?1",
    "(",
]
PIECES += ["%", "Mon,", "21", "Sep", "2026", "14:14:50", "GMT", "+0200", " ", "\t", "\\", "9" * 20, "\xff"]
anything = st.one_of(
    st.text(max_size=60),
    st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join),
)
NAMES = ("retry-after", "date", "age", "ratelimit", "ratelimit-remaining", "ratelimit-reset", "x-ratelimit-remaining")
NAMES += ("x-ratelimit-reset", "x-ratelimit-reset-after", "x-rate-limit-remaining", "x-rate-limit-reset")


@given(
    fields=st.dictionaries(st.sampled_from(NAMES), anything),
    status=st.integers(100, 599),
    now=st.floats(0, 4e9) | st.sampled_from([0.0, 1e9, 1.79e9]),
)
def test_whatever_they_say_it_is_a_wait_or_nothing_property(fields: dict[str, str], status: int, now: float) -> None:
    """Nothing raises, and every wait is a number of seconds that one could sleep."""
    said = answer_of(status, fields.get, now)
    for wait in (said.retry_after, said.exhausted, said.pause):
        assert wait is None or (math.isfinite(wait) and 0 <= wait <= LONGEST)


@given(remaining=st.integers(0, 2), wait=st.integers(0, 10**9), name=st.text('abc "\\;,=-', max_size=9))
def test_a_list_says_what_it_says_property(remaining: int, wait: int, name: str) -> None:
    """What is left and until when, whatever the policy is called."""
    quoted = name.replace("\\", r"\\").replace('"', r"\"")
    found = heard(200, ratelimit=f'"other";r=1;t=9, "{quoted}";r={remaining};t={wait}').exhausted
    assert found == (None if remaining else min(wait, LONGEST))


# --- our own ----------------------------------------------------------------------------------------------------------

OURS: list[tuple[Sequence[str], Sequence[str], int, Answer]] = [
    # styles, limits, requests: what a client hears from the last of them
    (["x-ratelimit"], ["5/minute"], 4, Answer(200)),
    (["x-ratelimit"], ["5/minute"], 5, Answer(200, None, 60)),
    (["x-ratelimit"], ["5/minute"], 6, Answer(429, 12, 60)),
    (["draft-11"], ["5/minute"], 4, Answer(200)),
    (["draft-11"], ["5/minute"], 5, Answer(200, None, 60)),
    (["draft-11"], ["5/minute"], 6, Answer(429, 12, 12)),
    (["draft-11"], ["5/minute", "5/hour"], 5, Answer(200, None, 3600)),
    (["draft-11"], ["5/minute", "6/hour"], 5, Answer(200, None, 60)),
    (["draft-11"], ["5/minute", "10 at once"], 5, Answer(200, None, 60)),
    (["x-ratelimit-windows"], ["5/minute"], 5, Answer(200)),  # they name no time
    (["x-ratelimit-windows"], ["5/minute"], 6, Answer(429, 12)),
    (list(STYLES), ["5/minute"], 5, Answer(200, None, 60)),
]


@pytest.mark.parametrize(("styles", "limits", "requests", "said"), OURS, ids=str)
def test_our_own_fields_are_read_back(styles: Sequence[str], limits: Sequence[str], requests: int, said: Answer) -> None:
    """What LimitGate says in any style is understood as it was meant."""

    def app(_: object, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return []

    store = MemoryStore(Clock(NOW * 1_000_000))
    gate = LimitGateWSGI(app, rules=[Rule("r", *limits, key=["ip"])], store=store, headers=styles)
    for _ in range(requests):
        reply = wsgi_reply(gate)
    assert answer_of(reply.status, reply.headers.get, NOW) == said


# --- what is too long -------------------------------------------------------------------------------------------------

TRIED = min(1_000_000, 300 * EXAMPLES)
FIELDS = ("retry-after", "date", "age", "ratelimit", "ratelimit-reset", "x-ratelimit-remaining", "x-ratelimit-reset")
TOKENS = (
    *("0", "1", "30", "999999999", "9" * 16, "9" * 400, "-1", ".5", "1e9", str(NOW + 9), str(NOW * 1000), HTTP_DATE, " ", ","),
    *(
        '"a";r=0;t=30',
        '"a";r=0',
        "limit=10, remaining=0, reset=5",
        ";",
        "=",
        '"',
        "?1",
        ":AA==:",
        "(",
        ")",
        "\\",
        "\x00",
        "\xe9",
        "\u0665",
    ),
)


@pytest.mark.parametrize("name", ["ratelimit", "retry-after", "date", "x-ratelimit-reset", "age"])
def test_long_fields_are_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field of more than 4 KB is not even looked at, one of 4 KB is."""
    parsed: list[int] = []
    monkeypatch.setattr(response_fields, "_policies", lambda value: parsed.append(len(value)) or [(0, 30)])
    heard_of = {"retry-after": "1" * 5000, "date": HTTP_DATE} if name == "date" else {}
    lines = ", ".join(['"a";r=0;t=30;x="' + "y" * 65_000 + '"'] * 90)
    assert answer_of(429, {**heard_of, name: lines}.get, NOW) == Answer(429)
    assert parsed == []
    assert answer_of(429, {"ratelimit": "x" * 4096}.get, NOW).exhausted == 30
    assert parsed == [4096]


def test_response_fields_fuzz() -> None:
    """Whatever another service sends, nothing is raised, and what is made of it is a time from now to a year."""
    rnd = random.Random(16)
    for _ in range(TRIED // 2):
        fields = {name: "".join(rnd.choices(TOKENS, k=rnd.choice((1, 1, 1, 2, 3, 9)))) for name in rnd.sample(FIELDS, 2)}
        found = answer_of(rnd.choice((200, 404, 429, 503)), fields.get, NOW)
        assert all(wait is None or 0 <= wait <= LONGEST for wait in found[1:]), fields
