"""What providers say about their limits, as real ones say it and as no one should."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta, timezone
from email.utils import formatdate
from itertools import product
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate import LimitGateWSGI, MemoryStore, Rule
from limitgate.http.rate_fields import PROVIDERS
from limitgate.limits.limit import Limit
from limitgate.llm.provider_fields import MOST_READ, Told, ToldLimit, Window, duration, limit_of, told
from limitgate.outbound.response_fields import LONGEST
from tests.support.clock import Clock
from tests.support.provider import Meter, go_duration

NOW = 1_790_000_000.0


def heard(status: int = 200, fields: dict[str, str] | None = None, host: str = "") -> Told:
    return told(status, (fields or {}).get, NOW, host)


def at(seconds: float, hours: int = 0) -> str:
    """A time of RFC 3339, from now, with an offset."""
    zone = timezone(timedelta(hours=hours))
    return datetime.fromtimestamp(NOW + seconds, zone).isoformat(timespec="seconds")


# --- durations --------------------------------------------------------------------------------------------------------

DURATIONS: list[tuple[str, float | None]] = [
    ("0s", 0),
    ("12ms", 0.012),
    ("1s", 1),
    ("7.66s", 7.66),
    ("6m0s", 360),
    ("1m30s", 90),
    ("2m59.56s", 179.56),
    ("1h2m3s", 3723),
    ("1h0m0s", 3600),
    ("1h0m0.000000001s", 3600.000000001),
    ("24h0m0s", 86_400),
    ("1ns", 1e-9),
    ("1.5\u00b5s", 1.5e-6),
    ("1.5\u03bcs", 1.5e-6),
    ("1.5us", 1.5e-6),
    ("1.5\u00c2\u00b5s", 1.5e-6),  # UTF-8 that was read as Latin-1
    ("1.234567ms", 0.001234567),
    ("59.999999999s", 59.999999999),
    ("8784h0m0s", LONGEST),
    ("1h", 3600),
    ("6m", 360),
    ("8784h0m0.1s", None),
    ("2562047h47m16.854775807s", None),  # the largest of Go
    ("99999999h", None),
    ("9" * 40 + "s", None),
    ("0." + "9" * 40 + "s", None),
    ("-1s", None),
    ("+1s", None),
    ("", None),
    ("s", None),
    ("1", None),
    ("1.s", None),
    (".5s", None),
    ("1s1m", None),
    ("1m1m", None),
    ("1m 1s", None),
    ("1.5h", None),
    ("1s\n", None),
    ("1e3s", None),
    ("\u0661s", None),
    ("1d", None),
    ("nan", None),
    ("inf", None),
]


@pytest.mark.parametrize(("text", "seconds"), DURATIONS, ids=lambda value: ascii(value)[:30])
def test_durations(text: str, seconds: float | None) -> None:
    """As Go prints them, to the nanosecond."""
    assert duration(text) == seconds


def go(nanoseconds: int) -> str:
    """Go's time.Duration.String."""
    for unit, size in (("ns", 1), ("\u00b5s", 10**3), ("ms", 10**6)):
        if 0 < nanoseconds < 1000 * size:
            fraction = f"{nanoseconds % size:0{len(str(size)) - 1}}" if size > 1 else ""
            return f"{nanoseconds // size}.{fraction}".rstrip("0").rstrip(".") + unit if fraction else f"{nanoseconds}{unit}"
    seconds, rest = divmod(nanoseconds, 10**9)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{seconds}.{rest:09}".rstrip("0").rstrip(".") + "s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text


@given(nanoseconds=st.integers(0, 10**10) | st.integers(0, int(LONGEST) * 10**9))
def test_durations_property(nanoseconds: int) -> None:
    """Exactly the nearest float."""
    assert duration(go(nanoseconds)) == nanoseconds / 10**9


# --- OpenAI, Azure, Groq ----------------------------------------------------------------------------------------------


def openai_fields(kind: str, limit: str, remaining: str, reset: str) -> dict[str, str]:
    given = {"limit": limit, "remaining": remaining, "reset": reset}
    return {f"x-ratelimit-{name}-{kind}": value for name, value in given.items()}


OPENAI: list[tuple[str, tuple[str, str, str], tuple[int | None, int | None, float | None, int | None] | None]] = [
    ("documented", ("60", "59", "1s"), (60, 59, 1, 60)),
    ("documented, tokens", ("150000", "149984", "6m0s"), (150_000, 149_984, 360, None)),
    ("a minute", ("200000", "199000", "300ms"), (200_000, 199_000, 0.3, 60)),
    ("nothing left", ("200000", "0", "59.8s"), (200_000, 0, 59.8, 60)),
    ("a day", ("200", "199", "7m12s"), (200, 199, 432, 86_400)),
    ("a second", ("10", "5", "500ms"), (10, 5, 0.5, 1)),
    ("an hour", ("1000", "900", "6m0s"), (1000, 900, 360, 3600)),
    ("full", ("10000", "10000", "0s"), (10_000, 10_000, 0, None)),
    ("full, rounded", ("10000", "9999", "6ms"), (10_000, 9999, 0.006, 60)),
    ("less than the resolution", ("30000", "29999", "2ms"), (30_000, 29_999, 0.002, 60)),
    ("far less", ("500000", "499999", "1ms"), (500_000, 499_999, 0.001, None)),
    ("a window that ends", ("1000", "999", "59s"), (1000, 999, 59, None)),
    ("no reset", ("60", "0", ""), (60, 0, None, None)),
    ("a wrong reset", ("60", "0", "soon"), (60, 0, None, None)),
    ("a negative reset", ("60", "0", "-1s"), (60, 0, None, None)),
    ("a reset in a century", ("60", "0", "876000h"), (60, 0, None, None)),
    ("more than the limit", ("60", "61", "1s"), None),
    ("negative", ("60", "-5", "1s"), (60, None, 1, None)),
    ("a fraction", ("60", "5.5", "1s"), (60, None, 1, None)),
    ("no limit", ("", "5", "1s"), (None, 5, 1, None)),
    ("huge", ("9" * 16, "5", "1s"), (None, 5, 1, None)),
    ("huger", ("9" * 5000, "9" * 5000, "9" * 5000), None),
    ("exponents", ("1e3", "1e2", "1s"), None),
    ("not ASCII", ("\u0661", "\u0661", "1s"), None),
    ("words", ("many", "some", "soon"), None),
    ("twice the same", ("60, 60", "59,59", "1s, 1000ms"), (60, 59, 1, 60)),
    ("two limits", ("60, 70", "59", "1s"), (None, 59, 1, None)),
    ("two resets", ("60", "59", "1s, 2s"), (60, 59, None, None)),
    ("a part malformed", ("60", "59,", "1s"), (60, None, 1, None)),
]


@pytest.mark.parametrize("row", OPENAI, ids=[each[0] for each in OPENAI])
def test_openai(row: Any) -> None:
    """Malformed and contradictory fields are unknown, and so is a period far from any common one."""
    _, given, window = row
    for kind, status in product(["requests", "tokens", "project-tokens"], [200, 429]):
        fields = {name: value for name, value in openai_fields(kind, *given).items() if value}
        expected = () if window is None else (Window(kind.removeprefix("project-"), *window),)
        assert heard(status, fields).windows == expected, (kind, status)


AZURE: list[tuple[tuple[str, str, str], tuple[int | None, int | None, float | None] | None]] = [
    (("120000", "119000", "30"), (120_000, 119_000, 30)),
    (("120000", "0", "30"), (120_000, 0, 30)),
    (("120000", "0", "0.5"), (120_000, 0, 0.5)),
    (("-1", "-1", "0"), None),
    (("0", "0", "0"), None),
    (("120000", "-1", "0"), (120_000, None, None)),
    (("-1", "500", "0"), (None, 500, None)),
    (("120000", "0", "0"), (120_000, 0, None)),
    (("120000", "0", str(NOW + 30)), (120_000, 0, None)),  # Unix time
]


@pytest.mark.parametrize(("given", "window"), AZURE, ids=str)
def test_azure(given: tuple[str, str, str], window: Any) -> None:
    """Bare seconds, and -1 and 0 for unknown; a window's end says nothing about its period."""
    found = heard(fields=openai_fields("tokens", *given))
    assert found.windows == (() if window is None else (Window("tokens", *window, None),))


@pytest.mark.parametrize(("host", "region"), [("api.groq.com", None), ("api.groq.com:443", None), ("", "us-west-1")])
def test_groq(host: str, region: str | None) -> None:
    """Its own documentation: requests per day, tokens per minute."""
    fields = openai_fields("requests", "14400", "14370", "2m59.56s") | openai_fields("tokens", "18000", "17997", "7.66s")
    found = heard(fields=fields | ({"x-groq-region": region} if region else {}), host=host)
    assert found.windows == (Window("requests", 14_400, 14_370, 179.56, 86_400), Window("tokens", 18_000, 17_997, 7.66, 60))
    assert [str(limit_of(window)) for window in found.windows] == ["14400/day", "18000/minute"]


# --- Anthropic --------------------------------------------------------------------------------------------------------

RESETS: list[tuple[str, float | None]] = [
    (at(30), 30),
    (at(30, 2), 30),
    (at(30, -11), 30),
    (at(30).replace("+00:00", "Z"), 30),
    (at(30).replace("+00:00", "z").replace("T", "t"), 30),
    (at(30).replace("T", " "), 30),
    (at(30).replace("+00:00", ".25Z"), 30.25),
    (at(30).replace("+00:00", ".123456789Z"), 30.123456),
    (at(-1), 0),
    (at(-5), 0),
    (at(-6), None),
    (at(-90), None),
    (at(LONGEST + 1), None),
    ("2026-12-31T23:59:60Z", 1_798_761_600 - NOW),
    ("9999-12-31T23:59:59Z", None),
    ("0001-01-01T00:00:00+23:59", None),
    ("2026-02-30T00:00:00Z", None),
    ("2026-10-01T25:00:00Z", None),
    ("2026-10-01T00:00:00+25:00", None),
    ("2026-10-01T00:00:00", None),
    ("2026-10-01", None),
    ("20261001T000000Z", None),
    (str(NOW + 30), None),
    ("30s", None),
    ("", None),
    ("\x00", None),
]


@pytest.mark.parametrize(("reset", "after"), RESETS, ids=lambda value: ascii(value)[:40])
def test_anthropic_resets(reset: str, after: float | None) -> None:
    """RFC 3339 with any offset, sometimes a second in the past."""
    name = "anthropic-ratelimit-tokens-"
    fields = {f"{name}limit": "40000", f"{name}remaining": "0", f"{name}reset": reset}
    (window,) = heard(fields=fields).windows
    assert window == Window("tokens", 40_000, 0, None if after is None else pytest.approx(after, abs=1e-6), 60)


def test_anthropic() -> None:
    fields = {}
    for name, limit, remaining in (("requests", 50, 49), ("tokens", 38_000, 30_000), ("input-tokens", 30_000, 24_000)):
        fields |= {f"anthropic-ratelimit-{name}-limit": str(limit), f"anthropic-ratelimit-{name}-remaining": str(remaining)}
        fields[f"anthropic-ratelimit-{name}-reset"] = at(12)
    fields["anthropic-ratelimit-output-tokens-remaining"] = "8000"
    fields["anthropic-ratelimit-unified-reset"] = str(NOW + 9999)
    found = heard(fields=fields | openai_fields("tokens", "60", "59", "1s"))
    assert found.windows == (
        Window("requests", 50, 49, 12, 60),
        Window("tokens", 38_000, 30_000, 12, 60),
        Window("input_tokens", 30_000, 24_000, 12, 60),
        Window("output_tokens", None, 8000, None, 60),
    )
    assert [str(limit_of(window)) for window in found.windows] == ["50/minute", "38000/minute", "30000/minute", "None"]


@pytest.mark.parametrize(
    ("limit", "remaining", "known"), [(30_500, 31_000, 30_500), (30_000, 31_000, 30_000), (30_000, 32_000, None)]
)
def test_rounded_to_thousands(limit: int, remaining: int, known: int | None) -> None:
    """It may exceed the limit by the rounding, no more."""
    name = "anthropic-ratelimit-tokens-"
    windows = heard(fields={f"{name}limit": str(limit), f"{name}remaining": str(remaining)}).windows
    assert [window.remaining for window in windows] == ([] if known is None else [known])


@pytest.mark.parametrize("skew", [-600, -3, 3, 600])
def test_a_time_is_by_the_clock_of_who_says_it(skew: float) -> None:
    """Clocks ten minutes apart make no difference where the response has a ``Date``; without one, the past is not believed."""
    name = "anthropic-ratelimit-tokens-"
    fields = {f"{name}limit": "9", f"{name}remaining": "0", f"{name}reset": at(skew + 30)}
    assert heard(fields={**fields, "date": formatdate(NOW + skew, usegmt=True)}).exhausted == 30
    assert heard(fields=fields).exhausted == (None if skew == -600 else 30 + skew)
    for date in ("", "today", "Mon, 99 Sep 2026 14:14:50 GMT", "9" * 999, "Mon, 21 Sep 99999 14:14:50 GMT"):
        assert heard(fields={**fields, "date": date}).exhausted == (None if skew == -600 else 30 + skew)


# --- waiting ----------------------------------------------------------------------------------------------------------

DATE = formatdate(NOW + 90, usegmt=True)
WAITS: list[tuple[dict[str, str], float | None]] = [
    ({}, None),
    ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
    ({"retry-after-ms": "1500.5"}, 1.5005),
    ({"retry-after-ms": "0", "retry-after": "2"}, 0),
    ({"retry-after-ms": "soon", "retry-after": "2"}, 2),
    ({"retry-after-ms": "-5", "retry-after": "2"}, 2),
    ({"retry-after-ms": "1500, 1600", "retry-after": "2"}, 2),
    ({"retry-after-ms": "1500, 1500.0", "retry-after": "2"}, 1.5),
    ({"retry-after-ms": "nan", "retry-after": "2"}, 2),
    ({"retry-after-ms": "9" * 12}, None),
    ({"retry-after": "7.5"}, 7.5),
    ({"retry-after": DATE}, 90),
    ({"retry-after": DATE, "date": formatdate(NOW + 60, usegmt=True)}, 30),
    ({"retry-after": "-1"}, None),
    ({"retry-after": "inf"}, None),
    ({"retry-after": "9" * 99}, LONGEST),
]


@pytest.mark.parametrize(("fields", "wait"), WAITS, ids=lambda value: ascii(value)[:50])
def test_retry_after(fields: dict[str, str], wait: float | None) -> None:
    """In the order of the SDKs, and of failures alone."""
    for status in (429, 500, 503, 529):
        assert heard(status, fields).retry_after == wait
    assert heard(200, fields).retry_after is None


def test_should_retry() -> None:
    """Only what says so."""
    for value, may in {"true": True, "false": False, "False": None, "0": None, "": None, "true, false": None}.items():
        assert heard(429, {"x-should-retry": value}).may_retry is may
    assert heard(429).may_retry is None


def test_exhausted() -> None:
    """The last reset of the exhausted windows; None without one, or if its reset is unknown."""
    left, none = openai_fields("requests", "60", "59", "1s"), openai_fields("tokens", "100", "0", "1m0s")
    assert heard(fields=left).exhausted is None
    assert heard(fields=left | none).exhausted == 60
    assert heard(fields=none | openai_fields("project-tokens", "50", "0", "1m30s")).exhausted == 90
    assert heard(fields=openai_fields("tokens", "100", "0", "?")).exhausted is None


# --- stated limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "limit"),
    [
        (Window("tokens", 200_000, None, None, 60), "200000/minute"),
        (Window("tokens", 60, None, None, 1), "60/second"),
        (Window("tokens", 60, None, None, 3600), "60/hour"),
        (Window("requests", 5_000_000, None, None, 86_400), "5000000/day"),
        (Window("tokens", 60_000_000, None, None, 60), "60000000/minute"),
        (Window("tokens", 60_000_001, None, None, 60), None),
        (Window("tokens", None, 5, 1, 60), None),
        (Window("tokens", 5, 5, 1, None), None),
    ],
    ids=str,
)
def test_a_limit(window: Window, limit: str | None) -> None:
    """It is one that counts exactly."""
    assert limit_of(window) == (limit and Limit(limit))
    assert limit is None or Limit(limit).count == window.limit


HEARD: list[tuple[str, str | None, list[str | None], list[str | None]]] = [
    # the limit at first, the limits in answers, and the limit in force after each answer
    ("the first", None, ["500/minute"], ["500/minute"]),
    ("the same", "500/minute", ["500/minute"], ["500/minute"]),
    ("the same rate", "60/minute", ["1/second"], ["1/second"]),
    ("an upgrade", "500/minute", ["4999/minute"], ["4999/minute"]),
    ("less", "500/minute", ["51/minute"], ["51/minute"]),
    ("tenfold", "500/minute", ["5000/minute", "5000/minute"], ["500/minute", "5000/minute"]),
    ("a tenth", "500/minute", ["50/minute", "50/minute"], ["500/minute", "50/minute"]),
    ("another period", "500/minute", ["500/day", "500/day"], ["500/minute", "500/day"]),
    ("answers that differ", "500/minute", ["5000/minute", "5001/minute", "5001/minute"], ["500/minute"] * 2 + ["5001/minute"]),
    ("a wrong one in between", "500/minute", ["5000/minute", "500/minute", "5000/minute"], ["500/minute"] * 3),
    ("an unknown one in between", "500/minute", ["5000/minute", None, "5000/minute"], ["500/minute"] * 3),
    ("a wrong one, and better ones", "500/minute", ["5/minute", "600/minute", "5/minute"], ["500/minute"] + ["600/minute"] * 2),
    ("nothing", "500/minute", [None, None], ["500/minute"] * 2),
    ("with a burst", "500/minute burst 50", ["500/minute", "600/minute"], ["500/minute burst 50", "600/minute"]),
    ("many times the period", "500 per 15 minutes", ["40/minute", "4/minute"], ["40/minute"] * 2),
]


@pytest.mark.parametrize(("current", "said", "in_force"), [each[1:] for each in HEARD], ids=[each[0] for each in HEARD])
def test_told_limits(current: str | None, said: list[str | None], in_force: list[str | None]) -> None:
    """An implausible limit is accepted if two answers in a row agree."""
    limit = ToldLimit(current and Limit(current))
    for each, expected in zip(said, in_force, strict=True):
        before = limit.current and str(limit.current)
        assert (limit.hear(each and Limit(each)), str(limit.current)) == (expected != before, expected)


def test_a_new_period_needs_two_answers() -> None:
    """It was computed."""
    limit = ToldLimit()
    heard = [limit.hear(each and Limit(each), twice=True) for each in ("5/minute", None, "5/minute", "6/minute", "6/minute")]
    assert (heard, str(limit.current)) == ([False] * 4 + [True], "6/minute")


# --- anything ---------------------------------------------------------------------------------------------------------

PIECES = [
    "0",
    "1",
    "60",
    "-1",
    "1s",
    "12ms",
    "6m0s",
    "7.66s",
    at(30),
    at(-1, 5),
    DATE,
    ",",
    " ",
    ".",
    "e9",
    "9" * 20,
    "\xff",
    "\u0665",
]
PIECES += ["T", "Z", "+00:00", "2026-", "true", "false", "h", "m", "s", "\u00b5s", "nan"]
anything = st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
NAMES = [
    f"x-ratelimit-{name}-{kind}"
    for name in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens", "project-tokens")
]
NAMES += [
    f"anthropic-ratelimit-{kind}-{name}"
    for name in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens", "input-tokens", "output-tokens")
]
NAMES += ["retry-after", "retry-after-ms", "x-should-retry", "date", "x-groq-region"]


@given(
    fields=st.dictionaries(st.sampled_from(NAMES), anything, max_size=12),
    status=st.integers(100, 599),
    now=st.floats(0, 4e9),
    host=st.sampled_from(["", "api.groq.com", "api.openai.com", "\x00"]),
)
def test_whatever_they_say_property(fields: dict[str, str], status: int, now: float, host: str) -> None:
    """Nothing raises; every number is in bounds, and every limit can be used."""
    found = told(status, fields.get, now, host)
    for wait in (found.retry_after, found.exhausted, *[window.reset_after for window in found.windows]):
        assert wait is None or (math.isfinite(wait) and 0 <= wait <= LONGEST)
    for window in found.windows:
        assert window.limit is None or 0 < window.limit < 10**15
        assert window.remaining is None or 0 <= window.remaining < 10**15
        assert window.limit is None or window.remaining is None or window.remaining <= window.limit
        limit = limit_of(window)
        assert limit is None or limit.count == window.limit


@given(
    count=st.integers(1, 10**6),
    period=st.sampled_from([("second", 1), ("minute", 60), ("hour", 3600), ("day", 86_400)]),
    share=st.floats(0, 1),
)
def test_a_true_bucket_is_read_rightly_or_not_at_all_property(count: int, period: tuple[str, int], share: float) -> None:
    """Whatever is used of it, the period is the true one, or unknown where the milliseconds do not suffice."""
    meter = Meter(count, period[1], "bucket")
    meter.take(round(count * share), NOW)
    left, reset = math.floor(count - meter.used(NOW)), meter.reset(NOW)
    (window,) = heard(fields=openai_fields("tokens", str(count), str(left), go_duration(reset))).windows
    limit = limit_of(window)
    assert str(limit) in {"None", f"{count}/{period[0]}"}
    if reset > 0.01:
        assert limit is not None


WRITTEN = {
    0: "0s",
    1: "1ms",
    12_000: "12ms",
    999_001: "1s",
    1_000_000: "1s",
    7_660_000: "7.66s",
    90_500_000: "1m30.5s",
    360_000_000: "6m0s",
    3_723_000_000: "1h2m3s",
}


@pytest.mark.parametrize(("us", "text"), WRITTEN.items())
def test_resets_that_we_write(us: int, text: str) -> None:
    """In the style of OpenAI, rounded up to milliseconds."""
    assert PROVIDERS["openai"][1](us, 0) == text


@given(us=st.integers(0, 10**13))
def test_resets_that_we_write_can_be_read_property(us: int) -> None:
    assert duration(PROVIDERS["openai"][1](us, 0)) == pytest.approx(math.ceil(us / 1000) / 1000)


@pytest.mark.parametrize("limit", ["60/minute", "500/minute", "10000/hour", "200/day"])
def test_a_client_reads_our_period_from_our_fields(limit: str) -> None:
    """With whole seconds, a second until full looked like a limit per second."""
    rule = Rule("api", limit, key=["global"])
    gate = LimitGateWSGI(lambda _, start: start("200 OK", []) or [], rules=[rule], headers="openai", store=MemoryStore(Clock()))
    for _ in range(3):
        fields: dict[str, str] = {}
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "203.0.113.7"}
        list(gate(environ, lambda _, headers, fields=fields: fields.update({name.lower(): value for name, value in headers})))
        (window,) = heard(fields=fields).windows
        assert str(limit_of(window)) == limit


def test_long_fields_are_not_read() -> None:
    for name in ("limit", "remaining", "reset"):
        given = {"limit": "60", "remaining": "59", "reset": "1s", name: ",".join(["1"] * MOST_READ)}
        (window,) = heard(fields=openai_fields("tokens", **given)).windows
        assert {"limit": window.limit, "remaining": window.remaining, "reset": window.reset_after}[name] is None


def test_told_limits_random() -> None:
    """The limit in force changes by less than tenfold, unless two answers in a row agree."""
    rnd = random.Random(37)
    for _ in range(200):
        limit, last = ToldLimit(Limit("1000/minute")), None
        for _ in range(50):
            said = rnd.choice(
                [None, *[f"{count}/{unit}" for count in (1, 99, 1000, 5000, 10**6) for unit in ("minute", "day")]]
            )
            before = limit.current
            if limit.hear(said and Limit(said)):
                assert str(limit.current) == said
                ratio = Limit(said).count / Limit(said).period * before.period / before.count
                assert 0.1 < ratio < 10 or said == last
            last = said


def test_dates_are_times() -> None:
    """The helper `at` writes the time that it names."""
    assert datetime.fromisoformat(at(30, 2)) == datetime.fromtimestamp(NOW + 30, UTC)
