from __future__ import annotations

import re
import time
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import example, given, strategies as st
from starlette.routing import Match, Route
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, RequestRedirect, Rule as FlaskRule

from limitgate.errors import ConfigError
from limitgate.http.paths import ANY, LONG, LONGEST, REST, PathIndex, Reach, first_interpretation, interpretations, segments


def matches(pattern: str, path: str, root: str = "") -> bool:
    """Whether a request for ``path`` falls under ``pattern``, by any of its interpretations."""
    index: PathIndex[str] = PathIndex()
    index.add(segments(pattern), pattern)
    return any(pattern in index.find(interpretation) for interpretation in interpretations(path, root))


SPELLINGS_OF_LOGIN = [
    "/login",
    "login",
    "login?x",
    "login#x",
    "http:login",
    "h:login?x",
    "//login",
    "///login",
    "/login/",
    "/login//",
    "//login//",
    "/./login",
    "/././login",
    "/.//login",
    "/login/.",
    "/login/./",
    "/x/../login",
    "/x/y/../../login",
    "/x//../login",
    "/../login",
    "/../../login",
    "/login/x/..",
    "/login/../login",
    "/login;x",
    "/login;",
    "/login;;",
    "/login;a=b",
    "/login;a=b;c=d",
    "/login;/",
    "/login/;x",
    "/login;x/;y/",
    "/;x/login",
    "/;/login",
    "/.;x/login",
    "/..;/login",
    "/x/..;/login",
    "/x/..;a=b/login",
    "/x;p/../login",
    "/x;p/..;q/login;r",
    "/;a=1//./login;b=2/.",
    "/login\n",
    "/login\r",
    "/login\r\n",
    "/login\t",
    "/login\x00",
    "/login\x1f",
    "/login\x7f",
    "/login\x85",
    "/login\n/",
    "/login;\n",
    "/login\n;x",
    "/\x00login",
    "/lo\x00gin",
    "/\n/login",
    "/.\n/login",
    "/x/.\x00./login",
    "\n/login",
    "//x/..//login//",
    "x/login",
    "\\/login",
    "/login\N{REPLACEMENT CHARACTER}",
    "/lo\N{REPLACEMENT CHARACTER}gin/",
    "\N{REPLACEMENT CHARACTER}/login",
    " /login",
    "http://host/login",
    "http://host//login/",
    "HTTP://user@[::1]:80/login;x",
    "http://host/login?x",
    "x:/login?x=/y",
    "x:/login#x",
]

OTHER_THAN_LOGIN = [
    "/",
    "//",
    "/logi",
    "/login2",
    "/xlogin",
    "/log/in",
    "/LOGIN",
    "/x/login",
    "/x;/login",
    "/login/x",
    "/login/..",
    "/login/../x",
    "/.login",
    "/..login",
    "/login..",
    "/.../login",
    "/login/...",
    "/login.json",
    "/ login",
    "/login ",
    "/login%0a",
    "/login?x",
    "/login#x",
    "/login\\",
    "/\\login",
    "/lo;gin",
    "http://login?/login",
    "http://[/host/x/login",
    "/lоgin",  # noqa: RUF001 - a Cyrillic letter
]


@pytest.mark.parametrize("path", SPELLINGS_OF_LOGIN)
def test_path_in_any_spelling_matches_its_pattern(path: str) -> None:
    """However a server lets one path be spelled, the rule for it applies."""
    assert matches("/login", path)


@pytest.mark.parametrize("path", OTHER_THAN_LOGIN)
def test_pattern_does_not_match_similar_paths(path: str) -> None:
    """A rule for one path leaves every other path alone."""
    assert not matches("/login", path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("/a/b", "/a;v=1/b"),
        ("/a/b", "/a;v=1/b;w=2"),
        ("/a/b", "/a/./b"),
        ("/a/b", "/a//b"),
        ("/a/b", "/a/c/../b"),
        ("/a/b", "/a/;x/b"),
        ("/a/b", "/a\x00/b"),
        ("/api/**", "/api"),
        ("/api/**", "/api/"),
        ("/api/**", "//api"),
        ("/api/**", "/api;v=1"),
        ("/api/**", "/api/x"),
        ("/api/**", "/api/x/y/z"),
        ("/api/**", "/api;v=1/x"),
        ("/api/**", "/api\n"),
        ("/api/**", "/x/../api/y"),
        ("/api/**", "/api/.."),
        ("/api/**", "/api/files/../../zzz"),
        ("/api/**", "/zzz/../api/files"),
        ("/**", "/"),
        ("/**", ""),
        ("/**", "*"),
        ("/**", "/anything/at/all"),
        ("/", "/"),
        ("/", ""),
        ("/", "//"),
        ("/", "/x/.."),
        ("/", "/;x"),
        ("/", "x"),
        ("/", "*"),
        ("/items/{id}", "/items/1"),
        ("/items/{id}", "/items/1/"),
        ("/items/{id}", "/items//1"),
        ("/items/{id}", "/items/a;b"),
        ("/items/{id}", "/items/;x"),
        ("/items/{id}", "/items/\n"),
        ("/items/{id}", "/items/\x00"),
        ("/items/{id}", "/items/."),
        ("/items/{id}", "/items/.."),
        ("/items/{id}", "/items/ "),
        ("/items/{id}", "/items/é"),
        ("/items/{id}", "/x/../items/1"),
        ("/items/{id}/edit", "/items/;x/edit"),
        ("/items/{id}/edit", "/items/../edit"),
        ("/items/{id}/**", "/items/\n"),
        ("/{a}/{b}", "/;/;"),
    ],
)
def test_a_pattern_matches_either_reading_of_a_path(pattern: str, path: str) -> None:
    """A path falls under a pattern tidied up, or as it was sent, whichever way the application reads it."""
    assert matches(pattern, path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("/api/**", "/apix"),
        ("/api/**", "/apix/y"),
        ("/api/**", "/ap"),
        ("/api/**", "/"),
        ("/api/**", "/x/api"),
        ("/api/**", "/API/x"),
        ("/api/**", "/api.json"),
        ("/items/{id}", "/items"),
        ("/items/{id}", "/items/"),
        ("/items/{id}", "/items//"),
        ("/items/{id}", "/items/1/2"),
        ("/items/{id}", "/item/1"),
        ("/{id}", "/"),
        ("/", "/x"),
        ("/a/b", "/a/b/c"),
        ("/a/b", "/a"),
        ("/a/b", "/a;/c/b"),
    ],
)
def test_a_pattern_does_not_match_what_neither_reading_is(pattern: str, path: str) -> None:
    """A placeholder is exactly one segment, and a prefix ends where a segment does."""
    assert not matches(pattern, path)


@pytest.mark.parametrize(
    ("path", "root", "seen"),
    [
        ("/v1/login", "/v1", "/login"),
        ("/v1", "/v1", "/"),
        ("/v1/", "/v1", "/"),
        ("/v1x/login", "/v1", "/v1x/login"),
        ("/v1login", "/v1", "/v1login"),
        ("/login", "/v1", "/login"),
        ("/v1/login", "", "/v1/login"),
        ("/a/v1/login", "/a/v1", "/login"),
        ("/v1/v1/login", "/v1", "/v1/login"),
        ("/v1//login", "/v1", "/login"),
        ("/v1//login", "/v1/", "/login"),
        ("//v1/login", "/v1", "/login"),
        ("/v1/login/", "/v1", "/login"),
        ("/v1/./login", "/v1", "/login"),
        ("/x/../v1/login", "/v1", "/login"),
        ("/v1/login;x", "/v1", "/login"),
        ("/v1;x/login", "/v1", "/login"),
        ("/v1/login\n", "/v1", "/login"),
    ],
)
def test_patterns_are_below_the_mount_point(path: str, root: str, seen: str) -> None:
    """What a pattern is matched with begins where the application is mounted."""
    assert interpretations(path, root)[0] == seen


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("/x;y", "/x;y/login"),
        ("/x;y", "/x;y/login\n"),
        ("/..", "/../login"),
        ("/\n", "/\n/login"),
        ("//a", "//a/login"),
        ("/a", "/x/a/login"),
        ("/a", "/x/a/login/"),
        ("/a", "/alogin"),
        ("/a", "x/a/login"),
        ("/a", "http://host/a/login"),
    ],
)
def test_a_mount_point_that_the_client_spells_hides_nothing(root: str, path: str) -> None:
    """Below a mount point with a placeholder, which the client fills in, the rules apply all the same."""
    assert matches("/login", path, root)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("/", ()),
        ("/login", ("login",)),
        ("/login/", ("login",)),
        ("/items/{id}", ("items", ANY)),
        ("/{a}/{_b2}", (ANY, ANY)),
        ("/api/**", ("api", REST)),
        ("/**", (REST,)),
        ("/items/{id}/**", ("items", ANY, REST)),
        ("/caf\u00e9/a b", ("caf\u00e9", "a b")),
        ("/.well-known/x", (".well-known", "x")),
        ("/...", ("...",)),
    ],
)
def test_a_pattern_is_read_segment_by_segment(pattern: str, expected: tuple[str, ...]) -> None:
    """Literals stand for themselves, a name in braces for any one segment, two stars for the rest."""
    assert segments(pattern) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "login",
        "**",
        "{id}",
        " /login",
        "//",
        "//login",
        "/a//b",
        "/a/./b",
        "/a/../b",
        "/..",
        "/**/a",
        "/a**",
        "/**a",
        "/*",
        "/a/*",
        "/a*b",
        "/{}",
        "/{id",
        "/id}",
        "/{id:int}",
        "/{path:path}",
        "/{1d}",
        "/{i d}",
        "/{\u00efd}",
        "/{id}.json",
        "/a{id}",
        "/a;b",
        "/a?b",
        "/a#b",
        "/a\n",
        "/a\x00b",
        "/a\x7f",
        "/\ud800",
        "/a<b>",
        "/a%ff",
        "/a%3bx",
        "/%2e%2e/a",
        "/a%2541",
        "/{path:path}/a",
    ],
)
def test_pattern_that_no_request_can_match_is_refused(pattern: str) -> None:
    """A pattern of another syntax is refused at start-up with what was expected, instead of never applying."""
    with pytest.raises(ConfigError, match="expected") as caught:
        segments(pattern)
    assert repr(pattern) in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("/caf%C3%A9", "/caf\u00e9"),
        ("/a%20b/%7Ex", "/a b/~x"),
        ("/100%25", "/100%"),
        ("/a%2Fb", "/a/b"),
        ("/items/:id", "/items/{id}"),
        (r"/items/:id(\d+)?/caf%C3%A9", "/items/{id}/caf\u00e9"),
        ("/items/<id>", "/items/{id}"),
        ("/items/<int:id>", "/items/{id}"),
        ("/items/{id:int}", "/items/{id}"),
        ("/files/<path:rest>", "/files/**"),
        ("/files/{rest:path}", "/files/**"),
    ],
)
def test_pattern_in_another_syntax_is_refused_with_a_suggestion(pattern: str, meant: str) -> None:
    """Escapes, and placeholders as other frameworks write them, match no request: the error says what to write instead."""
    with pytest.raises(ConfigError) as caught:
        segments(pattern)
    assert str(caught.value).endswith(f"that no request can match, expected {meant!r}")
    assert segments(meant)


@pytest.mark.parametrize("pattern", ["/items:batchGet", "/100%", "/50%-off", "/a:", "/:", "/12:30", "/a<b", "/~x"])
def test_a_pattern_of_ordinary_characters_is_a_literal(pattern: str) -> None:
    """Colons and percent signs that are no other syntax stand for themselves."""
    assert segments(pattern) == (pattern[1:],)


@given(st.text(), st.text())
@example("", "")
@example("*", "")
@example("login", "")
@example("/", "/")
@example("/a", "//")
def test_readings_never_raise_property(path: str, root: str) -> None:
    """Any text has interpretations, each of them a path, and none of them twice."""
    found = interpretations(path, root)
    assert found
    assert len(set(found)) == len(found)
    assert all(interpretation.startswith("/") for interpretation in found)


NASTY = [
    "",
    ".",
    "..",
    "...",
    ";",
    ";x",
    "..;",
    "..;a=b",
    "\n",
    "\x00",
    ".\x00.",
    "a",
    "a\n",
    "a;x",
    "login",
    "login\n",
    "b c",
    "{}",
]
nasty_paths = st.tuples(st.sampled_from(["/", "/", "/", "//", "", "\n"]), st.lists(st.sampled_from(NASTY), max_size=6)).map(
    lambda drawn: drawn[0] + "/".join(drawn[1])
)


@given(st.one_of(nasty_paths, st.text(alphabet="/.;a\n\x00", max_size=12)))
def test_a_clean_path_has_one_reading_property(path: str) -> None:
    """The first interpretation has nothing left to clean, so cleaning it again changes nothing."""
    clean = interpretations(path)[0]
    assert interpretations(clean) == (clean,)
    assert not re.search(r"//|[;\x00-\x1f\x7f-\x9f]|/\.{1,2}(/|\Z)|.\/\Z", clean)


pattern_segments = st.lists(st.sampled_from(["a", "login", "items", "...", ANY]), max_size=4).map(tuple)
patterns = st.tuples(pattern_segments, st.sampled_from([(), (REST,)])).map(lambda drawn: (*drawn[0], *drawn[1]))


def _written(pattern: Sequence[str], placeholder: str = "{{p{}}}", rest: str = REST) -> str:
    """A pattern as text; placeholders are numbered, since routers want them all different."""
    spelled = {ANY: placeholder, REST: rest}
    return "/" + "/".join(spelled.get(segment, segment).format(place) for place, segment in enumerate(pattern))


def _expression(pattern: Sequence[str]) -> re.Pattern[str]:
    body = "".join("/[^/]+" if segment == ANY else f"/{re.escape(segment)}" for segment in pattern if segment != REST)
    if REST in pattern:
        return re.compile(body + "(/.*)?" if body else ".*", re.DOTALL)
    return re.compile(body or "/", re.DOTALL)


@given(
    st.lists(patterns, max_size=12),
    st.lists(st.sampled_from(["a", "login", "items", "...", "other", "\n"]), max_size=6).map(
        lambda parts: "/" + "/".join(parts)
    ),
)
def test_the_index_finds_what_an_expression_would_property(written: list[tuple[str, ...]], path: str) -> None:
    """Every pattern that matches is found, once, and none that does not, however many there are."""
    index: PathIndex[int] = PathIndex()
    for place, pattern in enumerate(written):
        index.add(pattern, place)
    expected = [place for place, pattern in enumerate(written) if _expression(pattern).fullmatch(path)]
    assert sorted(index.find(path)) == expected


@given(pattern_segments, nasty_paths, st.sampled_from(["", "/v1", "/x;y", "/..", "/\n"]))
@example((ANY, "login"), "/;/login\n", "")
@example((ANY, "login"), "/\n/login\n", "")
@example((ANY, "login"), "/./login\n", "")
@example(("login",), "/login\n", "/x;y")
def test_what_starlette_routes_is_matched_property(pattern: tuple[str, ...], below: str, root: str) -> None:
    """A request that Starlette's router takes to a route falls under the pattern that is spelled like the route."""
    text = _written(pattern)
    path = root + below
    scope = {"type": "http", "method": "GET", "path": path, "root_path": root}
    if Route(text, lambda _: None).matches(scope)[0] is not Match.NONE:
        assert matches(text, path, root)


@given(pattern_segments, nasty_paths)
@example(("login",), "login")
@example(("login",), "//login")
def test_what_werkzeug_routes_is_matched_property(pattern: tuple[str, ...], path: str) -> None:
    """A request that Flask's router takes to a view falls under the pattern that is spelled like the view's."""
    adapter = Map([FlaskRule(_written(pattern, "<p{}>"), endpoint="view")]).bind("localhost")
    try:
        adapter.match(path, "GET")
    except (RequestRedirect, HTTPException):
        return
    assert matches(_written(pattern), path)


PATTERNS = ["/login", "/items/{id}", "/items/{id}/edit", "/api/**", "/", "/v1/{a}/**", "/{x}/{y}", "/a/a/a/a", "/..."]
INDEX: PathIndex[str] = PathIndex()
for _pattern in PATTERNS:
    INDEX.add(segments(_pattern), _pattern)
REACH = Reach.of(map(segments, PATTERNS))

units = st.sampled_from(
    [*NASTY, "/", "/a", "/login", "/items", "/edit", "/..", "/;", "/v1", "http://h", "x", "?", "\x80", "\u200d"]
)
long_paths = st.lists(st.tuples(units, st.sampled_from([1, 1, 2, 30, 70, 600])), min_size=1, max_size=8).map(
    lambda drawn: "".join(unit * times for unit, times in drawn)
)


@given(st.sampled_from(["", "/", "//", "http://h", "/v1"]), long_paths, st.sampled_from(["", "", "/v1", "/x;y", "/;", "/a"]))
@example("/", "/a;" * 300 + "/..", "")
@example("/", "x" * 600 + "/edit/", "")
@example("", "x:/a/b/c/d/e/f" + "/g" * 300 + "/..?", "")
@example("/", "items/" + "\x00" * 200 + "x" * 400 + "/edit", "")
@example("/login/", ";" * 600, "")
def test_a_cut_path_matches_what_the_whole_one_does_property(start: str, path: str, root: str) -> None:
    """The patterns that match a long path are those that match what it is cut to, or it is taken for any path."""
    whole, cut = interpretations(start + path, root), REACH.interpretations(start + path, root)
    if cut is not None:
        found = [[set(INDEX.find(interpretation)) for interpretation in each_way] for each_way in (whole, cut)]
        assert set.union(*found[0]) == set.union(*found[1])
        assert set.intersection(*found[0]) >= set.intersection(*found[1])
        assert len(start + path + root) <= LONG or sum(map(len, cut)) < 40_000


@pytest.mark.parametrize(
    "path",
    [
        "/" + "a" * 5000,
        "/items/" + "a" * 5000,
        "/items/" + "a" * 5000 + "/edit",
        "/api" + "/a" * 3000,
        "/api/" + "a/b;c=d/" * 500,
        "//api//" + "a//" * 500,
        "/api/data:image/png;base64," + "Ab+/9/" * 1000,
        "/api/a..b/" + "c" * 2000,
        "/" * 5000 + "login" + "/" * 5000,
        "/api/\u200d" + "\u200d" * 3000,
        "/login;" + "x" * 3000,
        "/v1/x/" + "\u20ac" * 3000,
    ],
)
def test_path_that_is_long_but_plausible_is_interpreted_exactly(path: str) -> None:
    """Long identifiers, deep paths, parameters and repeated slashes match their own patterns and no others."""
    cut = REACH.interpretations(path)
    assert cut is not None
    assert {found for interpretation in cut for found in INDEX.find(interpretation)} == {
        found for interpretation in interpretations(path) for found in INDEX.find(interpretation)
    }


@pytest.mark.parametrize(
    "path",
    [
        "/x" * 300 + "/..",
        "/" + "/;" * 300 + "/login",
        "/" + "\x00" * 600 + "login",
        "/" + "x" * LONGEST,
        "/a/\x00." * 400 + ".",
    ],
)
def test_path_that_takes_too_long_to_interpret_matches_every_pattern(path: str) -> None:
    """A long path that climbs, begins with much that comes to nothing, or is longer than any server's, is not told apart."""
    assert REACH.interpretations(path) is None


@given(st.one_of(nasty_paths, st.text(alphabet="/.;a\n\x00", max_size=12)), st.sampled_from(["", "/v1", "/x;y", "/a"]))
def test_the_first_interpretation_is_the_first_of_all_property(path: str, root: str) -> None:
    """What applications see as the path is the interpretation that patterns are tried on first."""
    assert first_interpretation(path, root) == interpretations(path, root)[0]


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/" * 5000 + "search", "", "/search"),
        ("/search/" + "x" * 5000, "", "/search/" + "x" * 5000),
        ("/./search;a//" + "x" * 5000 + "/;y/", "", "/search/" + "x" * 5000 + "/;y/"),
        ("/v1/search/" + "x" * 5000, "/v1", "/search/" + "x" * 5000),
        ("/" + "x" * 5000, "", "/" + "x" * 5000),
        ("/a/../b" + "/c" * 5000, "", "/b" + "/c" * 5000),
    ],
)
def test_the_path_of_a_long_request_is_cleaned_where_it_begins(path: str, root: str, expected: str) -> None:
    """Beyond 512 characters a path is shown as it was sent; what it begins with is clean."""
    assert first_interpretation(path, root) == expected


@pytest.fixture(scope="module")
def thousand_patterns() -> PathIndex[int]:
    index: PathIndex[int] = PathIndex()
    for place in range(1000):
        index.add(("a",) * (place % 50) + (ANY, str(place), REST), place)
    return index


@pytest.mark.parametrize("unit", ["/", "/a", "/..", "/a/..", "/.", ";", "/;", "/a;", "\x00", "/\n", "a", "/a;b", "\x80a", ":"])
def test_a_long_path_is_bounded_work(unit: str, thousand_patterns: PathIndex[int]) -> None:
    """A path as long as a server lets through is read and looked up in a few milliseconds on a busy machine."""
    reach = Reach(thousand_patterns.depth, 10)
    for root, start, size in product(["", "/v1", "/;/a"], ["/", "http://h/", "x", "/v1/"], [LONG - 20, LONGEST - 20, 65536]):
        path = start + unit * (size // len(unit))
        began = time.thread_time()
        for interpretation in reach.interpretations(path, root) or ():
            list(thousand_patterns.find(interpretation))
        first_interpretation(path, root)
        assert time.thread_time() - began < 0.1, (root, start, size)
