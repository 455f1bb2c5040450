"""Limits: what may be written, what it means, and the numbers that name windows inside a bucket."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate import ConfigError, Limit
from limitgate.algorithms import fixed_window
from limitgate.limits.bucket import MAX_WINDOWS, Bucket, bucket_of
from limitgate.limits.limit import NAMES, as_limit

DAY = 86400
YEAR = 366 * DAY
ALGORITHMS = ("gcra", "token_bucket", "leaky_bucket")


@st.composite
def limits(draw: st.DrawFn) -> Limit:
    """Any limit inside the bounds."""
    period = draw(st.sampled_from((1, 60, 3600, DAY, YEAR)) | st.integers(1, YEAR))
    count = draw(st.integers(1, 100) | st.integers(1, 1_000_000 * period))
    burst = draw(st.none() | st.integers(1, max(1, count * 10 * YEAR // period)))
    lease = draw(st.just(0) | st.integers(0, count if burst is None else burst))
    algorithm, borrow = draw(st.sampled_from(ALGORITHMS)), not lease and draw(st.booleans())
    return Limit(f"{count} per {period} seconds", burst=burst, algorithm=algorithm, lease=lease, borrow=borrow)


WRITTEN = [
    ("100/minute", 100, 60, 100),
    ("10/s burst 20", 10, 1, 20),
    ("5 per 15 minutes", 5, 900, 5),
    ("1000/day", 1000, DAY, 1000),
    ("7 per hour", 7, 3600, 7),
    ("3/sec", 3, 1, 3),
    ("3/m", 3, 60, 3),
    ("3/min", 3, 60, 3),
    ("3/h", 3, 3600, 3),
    ("3/d", 3, DAY, 3),
    ("1 per 2 days burst 9", 1, 2 * DAY, 9),
    ("20/second burst 1", 20, 1, 1),
    ("  4 / Hour  BURST 2 ", 4, 3600, 2),
    ("007/second", 7, 1, 7),
    ("1 per 366 days", 1, YEAR, 1),
]


@pytest.mark.parametrize(("text", "count", "period", "burst"), WRITTEN)
def test_a_limit_is_read_as_written(text: str, count: int, period: int, burst: int) -> None:
    """Count, period and burst are the numbers in the text; the burst defaults to the count."""
    limit = Limit(text)
    assert (limit.count, limit.period, limit.burst, limit.algorithm) == (count, period, burst, "gcra")


NO_LIMITS = [
    "",
    " ",
    "5",
    "/minute",
    "5/",
    "5 minute",
    "5perminute",
    "-1/second",
    "+5/second",
    "1.5/second",
    "1e3/second",
    "1_000/second",
    "5 per 0 seconds",
    "5/fortnight",
    "5/month",
    "5/second/minute",
    "5/second burst",
    "5/second burst 0",
    "5/second burst -1",
    "5/second burst 1.5",
    "5/second; 6/minute",
    "5/second\x00",
    "\uff15/second",
    "5/\u017fecond",
    "9" * 5000 + "/second",
    None,
    5,
    5.0,
    b"5/second",
    ["5/second"],
]


@pytest.mark.parametrize("text", NO_LIMITS, ids=lambda text: repr(text)[:30])
def test_limit_from_invalid_text_is_refused(text: object) -> None:
    """Anything else is a ConfigError that says what was expected."""
    with pytest.raises(ConfigError, match="expected"):
        Limit(text)


@given(st.text(st.sampled_from("0123456789/ persmindayhoubt.-"), max_size=30))
def test_any_text_is_a_limit_or_a_config_error_property(text: str) -> None:
    """No text makes the parser fail in any other way, and what it reads is in bounds."""
    try:
        limit = Limit(text)
    except ConfigError:
        return
    assert limit.count >= 0
    assert limit.burst >= min(limit.count, 1)
    assert 1 <= limit.period <= YEAR


BOUNDS = [
    ("1000000/second", "1000001/second"),
    ("60000000/minute", "60000001/minute"),
    ("86400000000/day", "86400000001/day"),
    ("31622400000000 per 366 days", "31622400000001 per 366 days"),
    ("1 per 366 days", "1 per 367 days"),
    ("1 per 31622400 seconds", "1 per 31622401 seconds"),
    ("1 per 8784 hours", "1 per 8785 hours"),
]


@pytest.mark.parametrize(("inside", "outside"), BOUNDS)
def test_a_limit_that_could_not_be_exact_is_refused(inside: str, outside: str) -> None:
    """A million per second and 366 days are allowed, one more is a ConfigError."""
    assert Limit(inside)
    with pytest.raises(ConfigError, match="expected"):
        Limit(outside)


def test_limit_with_a_burst_that_refills_too_slowly_is_refused() -> None:
    """A burst may take ten times 366 days to be earned back, not longer."""
    assert Limit("1/day burst 3660").burst == 3660
    with pytest.raises(ConfigError, match="expected a burst"):
        Limit("1/day burst 3661")


OPTIONS = [
    {"burst": 0},
    {"burst": -1},
    {"burst": 2.0},
    {"burst": True},
    {"burst": "5"},
    {"algorithm": "nonsense"},
    {"algorithm": ""},
    {"algorithm": "GCRA"},
    {"lease": -1},
    {"lease": 6},
    {"lease": 10**30},
    {"lease": 3, "burst": 2},
    {"lease": 1.0},
    {"lease": "1"},
    {"lease": True},
    {"lease": False},
    {"lease": None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_bad_option_is_refused(options: dict[str, object]) -> None:
    """A burst, an algorithm or a lease that makes no sense is a ConfigError that says what was expected."""
    with pytest.raises(ConfigError, match="expected"):
        Limit("5/second", **options)


def test_a_burst_is_given_once() -> None:
    """The burst may stand in the text or beside it, not in both places."""
    assert Limit("5/second", burst=9) == Limit("5/second burst 9")
    with pytest.raises(ConfigError, match="twice"):
        Limit("5/second burst 9", burst=9)


def test_equal_limits_are_equal_however_they_were_written() -> None:
    """Two spellings of one limit are one limit; every part tells limits apart."""
    assert len({Limit("60/minute"), Limit("60 per 60 seconds"), Limit("60 per 1 minutes burst 60")}) == 1
    others = {Limit("60/minute"), Limit("61/minute", burst=60), Limit("60/hour"), Limit("60/minute burst 61")}
    assert len(others | {Limit("60/minute", algorithm="token_bucket"), Limit("60/minute", lease=1)}) == 6


@pytest.mark.parametrize("lease", [0, 1, 5])
def test_a_lease_is_off_unless_it_is_given(lease: int) -> None:
    """A limit is leased from only where somebody says so, with up to its burst, and shows it."""
    assert Limit("5/second").lease == 0
    assert (Limit("5/second") == Limit("5/second", lease=lease)) is (lease == 0)
    assert Limit("5/second", lease=lease).lease == Limit("5/second").leased(lease).lease == lease
    assert repr(Limit("5/second", lease=lease)) == (f"Limit('5/second', lease={lease})" if lease else "Limit('5/second')")


def test_limit_leased_keeps_its_other_fields() -> None:
    """A limit with a lease is the same limit but for its lease, and no other than its burst allows."""
    limit = Limit("10/s burst 20", algorithm="leaky_bucket")
    assert limit.leased(20) == Limit("10/s burst 20", algorithm="leaky_bucket", lease=20)
    assert limit.leased(20).leased(0) == limit
    with pytest.raises(ConfigError, match="expected a lease of 0 to 20"):
        limit.leased(21)


def test_the_smallest_lease_is_that_of_the_bucket() -> None:
    """Limits that are checked together are leased from together, as far as the smallest of their leases goes."""
    assert bucket_of(Limit("5/second", lease=5), Limit("9/day", lease=2)).lease == 2
    assert bucket_of("5/second", "9/day").lease == bucket_of(Limit("5/second", lease=0)).lease == 0


def test_a_lease_is_for_all_limits_of_a_bucket() -> None:
    """Where some limits have a lease and others have none, the message says which, and what was expected."""
    with pytest.raises(ConfigError, match="5/second has lease and 9/day has no lease, expected one for all") as caught:
        bucket_of(Limit("5/second", lease=5), Limit("9/day"))
    assert str(caught.value).endswith("or for none")


def test_window_number_is_the_same_with_and_without_lease() -> None:
    """A bucket is found again when its limit gets a lease or loses it."""
    assert bucket_of(Limit("5/second", lease=5)).ids == bucket_of("5/second").ids


@given(limits())
def test_text_and_repr_lead_back_to_the_limit_property(limit: Limit) -> None:
    """What a limit prints can be read again."""
    assert Limit(str(limit), algorithm=limit.algorithm, lease=limit.lease, borrow=limit.borrow) == limit
    assert eval(repr(limit), {"Limit": Limit}) == limit


@given(limits())
def test_a_copy_is_the_same_in_every_field_property(limit: Limit) -> None:
    """A limit survives pickling and copying with everything that was worked out for it."""
    for other in (pickle.loads(pickle.dumps(limit)), copy.copy(limit), copy.deepcopy(limit)):
        assert other == limit
        assert hash(other) == hash(limit)
        assert dataclasses.astuple(other) == dataclasses.astuple(limit)


@pytest.mark.parametrize("name", ["count", "period", "burst", "algorithm", "lease", "another"])
def test_a_limit_cannot_be_changed(name: str) -> None:
    """A limit is immutable."""
    limit = Limit("5/second")
    with pytest.raises((AttributeError, TypeError)):
        setattr(limit, name, 1)
    assert limit == Limit("5/second")


LIKE_LIMITS = [
    (Limit("5/second"), Limit("5/second")),
    ("5/second", Limit("5/second")),
    ({"limit": "5/second"}, Limit("5/second")),
    ({"limit": "5/second", "burst": 9, "algorithm": "token_bucket"}, Limit("5/second burst 9", algorithm="token_bucket")),
    ({"limit": "5/second", "lease": 3}, Limit("5/second", lease=3)),
]


@pytest.mark.parametrize(("value", "limit"), LIKE_LIMITS, ids=str)
def test_a_limit_can_be_given_in_several_forms(value: object, limit: Limit) -> None:
    """A limit, its text or a mapping mean the same."""
    assert as_limit(value) == limit


@pytest.mark.parametrize("value", [None, 5, {}, {"burst": 5}, {"limit": "5/second", "bursts": 9}, ("5/second",)], ids=str)
def test_other_forms_of_a_limit_are_refused(value: object) -> None:
    """Anything else is a ConfigError that says what was expected."""
    with pytest.raises(ConfigError, match="expected"):
        as_limit(value)


@pytest.mark.parametrize(("period", "unit"), [(1, "second"), (60, "minute"), (3600, "hour"), (DAY, "day"), (900, None)])
def test_unit_of_a_limit_has_an_exact_length(period: int, unit: str | None) -> None:
    """Only periods of exactly one unit have a name."""
    assert Limit(f"5 per {period} seconds").unit == unit


def test_window_number_is_the_same_for_any_count() -> None:
    """Count and burst are no part of a window's number."""
    assert bucket_of("5/second", "9/day").ids == bucket_of("500/second burst 7", "1/day").ids


def test_window_number_is_the_same_beside_other_windows() -> None:
    """A window's number depends neither on the windows beside it nor on their order."""
    second, day = bucket_of("5/second", "9/day").ids
    assert bucket_of("9/day", "5/second").ids == (day, second)
    assert bucket_of("5/second").ids == (second,)


def test_windows_of_one_period_keep_their_places() -> None:
    """Equal periods are told apart by their order."""
    first, second, third = bucket_of("5/second", "9/second burst 1", "5/second").ids
    assert len({first, second, third}) == 3
    assert bucket_of("7/second", "8/minute", "6/second").ids[::2] == (first, second)


def test_another_algorithm_is_another_window() -> None:
    """Changing a bucket's algorithm starts it anew."""
    ids = [bucket_of(Limit("5/second", algorithm=algorithm)).ids for algorithm in ALGORITHMS]
    assert len(set(ids)) == 3


@given(st.lists(limits(), min_size=1, max_size=8))
def test_windows_of_one_bucket_have_numbers_of_their_own_property(several: list[Limit]) -> None:
    """No two windows of a bucket share a number, and every number fits into the six bytes that Redis keeps."""
    ids = Bucket(tuple(limit.leased(0) for limit in several)).ids
    assert len(set(ids)) == len(several)
    assert all(0 <= window < 2**48 for window in ids)


@pytest.mark.parametrize("period", ["second", "{} seconds"])
def test_bucket_with_too_many_limits_is_refused(period: str) -> None:
    """More limits than anybody needs are a mistake at start-up, not a script that fails at every request."""
    most = [Limit(f"5 per {period.format(number + 1)}") for number in range(MAX_WINDOWS)]
    assert len(set(Bucket(tuple(most)).ids)) == MAX_WINDOWS
    with pytest.raises(ConfigError, match=f"{MAX_WINDOWS + 1} limits are checked together, expected at most"):
        Bucket((*most, Limit("5/second")))


@pytest.mark.parametrize("text", ["5/week", "5 per week", "5/w", "5 per 1 weeks", "5/wk", "5 per 7 days"])
def test_a_week_is_a_unit(text: str) -> None:
    """Seven days, whatever they are called."""
    assert (Limit(text).period, str(Limit(text))) == (604_800, "5/week")


@pytest.mark.parametrize("unit", ["year", "fortnight", "x"])
def test_limit_with_an_unknown_unit_names_the_valid_units(unit: str) -> None:
    """Months are the commonest: it is said how to write one."""
    expected = (
        f"'{unit}' is not a unit, expected second, minute, hour, day or week, or several of them, such as '30 days' for a month"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Limit(f"5/{unit}")


FIXED = {"algorithm": "fixed_window"}
MONTHS = [
    (Limit("1000/month", **FIXED), "1000/month", 31 * DAY, "month"),
    (Limit("1000 per 1 months", **FIXED), "1000/month", 31 * DAY, "month"),
    (Limit("5 per 3 Months", **FIXED, align="Europe/Berlin"), "5 per 3 months", 92 * DAY, None),
    (Limit("5 per 12 months", **FIXED, align="utc"), "5 per 12 months", 366 * DAY, None),
]


@pytest.mark.parametrize(("limit", "text", "period", "unit"), MONTHS, ids=str)
def test_a_month_is_a_unit_of_fixed_windows(limit: Limit, text: str, period: int, unit: str | None) -> None:
    """Its period is that of the longest month, and it is not as many days: those begin at other times."""
    assert (str(limit), limit.period, limit.unit) == (text, period, unit)
    assert as_limit(limit.given) == eval(repr(limit)) == limit.having(align=limit.align) == limit
    assert Limit(f"{limit.count} per {period} seconds", **FIXED, align=limit.align) != limit
    assert limit.share(4).months == limit.months


OTHERS = [name for name in NAMES if name not in ("fixed_window", "warm_up")]
OTHER_MONTHS = [
    ("5/month", {}, "gcra is the default; expected algorithm: fixed_window, or days"),
    ("5 per 2 months", {}, "expected algorithm: fixed_window, or days, such as '30 days' for a month"),
    *[("5/month", {"algorithm": each}, f"not {each}; expected algorithm: fixed_window") for each in OTHERS],
    ("5/month", {"warm_up": 5}, "not warm_up"),
    ("5/month burst 9", FIXED, "expected no burst"),
    ("5/month", {**FIXED, "align": "first-request"}, "expected align utc or a time zone, because a calendar month can't begin"),
    ("5 per 0 months", FIXED, "expected a period of at least 1 month"),
    ("5 per 13 months", FIXED, "expected a period of at most 12 months"),
    ("5 per 999999999 months", FIXED, "expected a period of at most 12 months"),
]


@pytest.mark.parametrize(("text", "options", "expected"), OTHER_MONTHS, ids=str)
def test_months_of_other_limits_are_refused(text: str, options: dict[str, Any], expected: str) -> None:
    """The error says which algorithm knows them, wherever the limit is given."""
    for make in (lambda: Limit(text, **options), lambda: bucket_of(as_limit({"limit": text, **options}))):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            make()


def test_the_numbers_of_a_warm_up_are_exact() -> None:
    """Its storage is so many ticks; only a cost that would owe too much doesn't fit."""
    limit = Limit("10/minute", algorithm="warm_up", warm_up="30s")
    assert limit.full == 30 * 1_000_000 * 10
    assert limit.most == (limit.ceiling - limit.full) // (60 * 1_000_000)
    assert (Limit("10/minute").full, Limit("10/minute").most) == (0, 10)


BLOCKED = [
    ("0/day", {}),
    ("0 per 15 minutes", {}),
    ("0/s burst 20", {}),
    ("0/second", {"burst": 5}),
    ("0/day", {"lease": 5}),
    ("0/day", {"borrow": True}),
    ("0/day", {"warm_up": "10s"}),
    ("0/month", {}),
    ("0/month", {"align": "Europe/Berlin"}),
    ("0 at once", {}),
    ("0 at once", {"algorithm": "concurrency"}),
    *[("0/day", {"algorithm": each}) for each in NAMES],
]


@pytest.mark.parametrize(("text", "options"), BLOCKED, ids=str)
def test_a_count_of_0_is_a_limit(text: str, options: dict[str, Any]) -> None:
    """Whatever else is said, it is a limit of nothing, and can be written down and read again."""
    limit = Limit(text, **options)
    assert (limit.count, limit.burst, limit.lease, limit.most) == (0, 0, 0, 0)
    assert as_limit(limit.given) == eval(repr(limit)) == limit
    assert limit.share(4).count == limit.less(0).burst == 0
    assert bucket_of(limit).refuses_all


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("0/day", {"algorithm": "gcrb"}, "'gcrb' is not an algorithm, did you mean 'gcra'?"),
        ("0/day", {"algorithm": "concurrency"}, "expected '20 at once' for the algorithm concurrency"),
        ("0/day", {"align": "Europe/Berln"}, "did you mean 'Europe/Berlin'?"),
        ("0 per 400 days", {}, "expected a period of at most 366 days"),
        ("5/day burst 0", {}, "expected a burst of at least 1"),
        ("-0/day", {}, "is not a limit"),
    ],
)
def test_limit_with_a_count_of_0_and_invalid_options_is_refused(text: str, options: dict[str, Any], expected: str) -> None:
    """Names that do not exist are mistakes there, too."""
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Limit(text, **options)


NO_ALIGN = [
    ({"align": "utc"}, "align 'utc' is for a fixed_window only, expected algorithm: fixed_window beside it"),
    ({"align": "Europe/Berln"}, "align 'Europe/Berln' is for a fixed_window only, expected algorithm: fixed_window beside it"),
    ({**FIXED, "align": "Europe/Berln"}, "not 'Europe/Berln'; did you mean 'Europe/Berlin'?"),
    ({**FIXED, "align": "europe/berlin "}, "did you mean 'Europe/Berlin'?"),
    ({**FIXED, "align": "Berlin"}, "did you mean 'Europe/Berlin'?"),
    ({**FIXED, "align": "New York"}, "did you mean 'America/New_York'?"),
    ({**FIXED, "align": "first request"}, "did you mean 'first-request'?"),
]


@pytest.mark.parametrize(("options", "expected"), NO_ALIGN, ids=str)
def test_limit_with_an_invalid_align_is_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Limit("5/day", **options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((5, 60), "(5, 60) is a tuple, expected text such as '5 per 60 seconds'"),
        ([5, 60], "[5, 60] is a list, expected text such as '5 per 60 seconds'"),
        ((5, "minute"), "expected text such as '5/minute'"),
        (("5/second", "9/minute"), "is a tuple, expected each limit separately"),
    ],
)
def test_limit_from_a_tuple_is_refused(given: object, expected: str) -> None:
    """It is said how a pair of other limiters is written here."""
    with pytest.raises(ConfigError, match=re.escape(expected)):
        as_limit(given)


@pytest.mark.parametrize("limit", ["5/fortnight", 5, None], ids=str)
def test_windows_of_a_bad_limit_are_refused(limit: object) -> None:
    """A mistake in one limit is a ConfigError."""
    with pytest.raises(ConfigError, match="expected"):
        bucket_of("5/second", limit)


# --- shares -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "processes", "cost", "shared"),
    [
        ("100/minute", 1, 1, "100/minute"),
        ("100/minute", 4, 1, "25/minute"),
        ("5/second", 2, 1, "5 per 2 seconds burst 2"),
        ("6/minute", 4, 1, "3 per 120 seconds burst 1"),
        ("10/second burst 20", 5, 1, "2/second burst 4"),
        ("10/second burst 19", 5, 1, "2/second burst 3"),
        ("2/minute", 8, 1, "1 per 240 seconds"),
        ("10/second", 5, 7, "2/second burst 7"),
        ("10/second", 5, 2, "2/second"),
        ("10/second", 5, 0, "2/second"),
        ("10/second", 5, 99, "2/second burst 10"),
    ],
)
def test_a_share_is_a_limit_divided(text: str, processes: int, cost: int, shared: str) -> None:
    """The rate is divided exactly, in the limit's own period where that can be; the burst is what whole requests allow."""
    share = Limit(text).share(processes, cost)
    assert share == Limit(shared)
    assert (share.period_us, share.capacity, share.ceiling) == (
        Limit(shared).period_us,
        Limit(shared).capacity,
        Limit(shared).ceiling,
    )


@given(limits(), st.integers(1, 100_000), st.integers(0, 10**6))
def test_shares_of_a_limit_never_exceed_it_in_total_property(limit: Limit, processes: int, cost: int) -> None:
    """All shares together have exactly the limit's rate, and no more than its burst but for one request in each."""
    share = limit.share(processes, cost)
    assert processes * share.count * limit.period == limit.count * share.period
    assert share.period == limit.period or share.period % limit.period == 0
    assert 1 <= share.burst <= limit.burst
    needed = 1 if limit.borrow else min(max(cost, 1), limit.burst)
    assert share.burst >= needed
    assert processes * share.burst <= limit.burst or share.burst == needed
    assert share.capacity == share.burst * share.period * 1_000_000
    assert (share.algorithm, share.lease) == (limit.algorithm, 0)


def test_the_rarest_limit_can_be_shared() -> None:
    """Where the period is the longest that a limit may have, that of its share is longer still."""
    share = Limit("1 per 366 days burst 10").share(100)
    assert (share.count, share.period, share.burst) == (1, 100 * YEAR, 1)


def test_the_windows_of_a_share_are_the_same_every_time() -> None:
    """A bucket's shared windows are one object, whatever costs come, unless one needs more than its share of the burst."""
    bucket = bucket_of("10/second", "600/minute burst 90")
    share = bucket.share(4)
    assert [str(limit) for limit in share.limits] == ["5 per 2 seconds burst 2", "150/minute burst 22"]
    assert all(bucket.share(4, cost) is share for cost in (0, 1, 2))
    dear = bucket.share(4, 5)
    assert [limit.burst for limit in dear.limits] == [5, 22]
    assert dear is bucket.share(4, 5)
    assert dear.ids == share.ids
    assert bucket.share(1, 5) is bucket


def test_shares_of_limits_with_equal_periods_have_different_windows() -> None:
    """Two limits whose shares have one period have a place each in the bucket."""
    share = bucket_of("5/second", "10 per 2 seconds").share(2)
    assert len(set(share.ids)) == 2


def test_the_windows_of_a_share_have_no_lease() -> None:
    """Where a limit has a lease, its share has none: nothing is taken in advance from this process itself."""
    assert bucket_of(Limit("10/second", lease=9)).share(4).lease == 0


@pytest.mark.parametrize("name", ["localtime", "posixrules", "", "/", "..", "Europe", "Europe/Berlin ", "utc ", 5])
def test_align_with_an_unknown_time_zone_is_refused(name: object) -> None:
    """Nor is a name under which each machine has another one."""
    with pytest.raises(ConfigError, match="align"):
        Limit("5/day", algorithm="fixed_window", align=name)


def test_a_system_without_time_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is known, whoever names one is told what to install."""
    with pytest.raises(ConfigError, match=r"a time zone such as Europe/Berlin, not 'Mars/Olympus'$"):
        Limit("5/day", algorithm="fixed_window", align="Mars/Olympus")
    monkeypatch.setattr(fixed_window, "available_timezones", set)
    with pytest.raises(ConfigError, match=r"pip install tzdata$"):
        Limit("5/day", algorithm="fixed_window", align="Mars/Olympus")


@pytest.mark.parametrize("months", [5, 7, 8, 9, 10, 11])
def test_months_divide_a_year(months: int) -> None:
    """Otherwise windows would begin in other months each year."""
    with pytest.raises(ConfigError, match=rf"limit '9 per {months} months': .*expected 1, 2, 3, 4, 6 or 12"):
        Limit(f"9 per {months} months", algorithm="fixed_window")


@pytest.mark.parametrize("text", ["1000/M", "1000 per M", "5 per 3 M", "5/M burst 2"])
def test_unit_of_a_capital_m_is_refused(text: str) -> None:
    """It may mean minutes or months."""
    with pytest.raises(ConfigError, match="'M' may be minute or month, expected 'minute' or 'm', or 'month'"):
        Limit(text)
    assert Limit("1000/m") == Limit("1000/MIN")


@pytest.mark.parametrize(
    ("text", "options"), [("5 per 2 months", {"lease": 9}), ("9999999999999/month", {}), ("5/month burst 9", {})]
)
def test_errors_about_months_show_the_text(text: str, options: Any) -> None:
    with pytest.raises(ConfigError, match=f"limit '{text}'"):
        Limit(text, algorithm="fixed_window", **options)


@pytest.mark.parametrize("align", ["localtime", "Localtime", "posixrules"])
def test_align_of_a_machine_specific_zone_is_not_suggested(align: str) -> None:
    with pytest.raises(ConfigError, match="expected align utc") as caught:
        Limit("5/day", algorithm="fixed_window", align=align)
    assert f"did you mean '{align.lower()}'" not in str(caught.value)
