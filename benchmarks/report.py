"""Results as Markdown: the page in docs/, the summary in README."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

from benchmarks.attack import AT_ONCE, Attack, Rush
from benchmarks.contenders import BARE, PEERS, WSGI, Contender
from benchmarks.cpu import CALLER, CALLS, Naming, in_memory, on_redis
from benchmarks.drive import CROWD
from benchmarks.end_to_end import CONNECTIONS
from benchmarks.example import BARE_EXAMPLE, EXAMPLE
from benchmarks.figures import Bar, Failed, Outcomes, Taken, best, over, ratio, server
from benchmarks.frameworks import Framework, frameworks
from benchmarks.growth import Growth
from benchmarks.memory_use import REQUESTS
from benchmarks.options import PLAIN, Option, options, peer_of
from benchmarks.results import ASGI, CROWDED, Results, bars

BEGIN, END = "<!-- benchmark -->", "<!-- /benchmark -->"
"""What the summary stands between in README."""
NOTHING = "-"

Cell = Callable[[Outcomes, str], str]
"""What to write about one contender."""

_LEAD = """\
This page compares what LimitGate and its peers cost per request in CPU, Redis commands and memory. `make bench` generates
it."""
_HOW = """\
Each limiter protects the same application with one route, by README's first rule: 5 per second, 100 per minute and 2,000
per day for each client. LimitGate uses `key: [path, ip]` and sends rate headers; the peers count by address.

Figures are the CPU time of the process minus that of the bare application, both on uvloop without a server. All contenders take
turns in many short rounds. Figures and ratios are medians over the rounds; the best round is in parentheses. Buckets drain
between two requests of a client.

Redis runs on the same machine, on a unix socket. Smooth windows admit at most their burst at once; fixed windows admit twice
as much around a boundary. By default, redis-py's pool refuses the 101st connection."""
_CALLS = """\
The last four rows only show the cost of calls to Redis. Shared calls with prepacked arguments are the minimum."""
_KINDS = """\
The whole example has `config/`, a trusted proxy, and a login with a decorator. Of 32 requests, one has a VIP's
API key, three are logins, and one is a health check."""
_COMPARED = """\
"Times the peer" is LimitGate's CPU divided by that of the cheapest peer with the same feature. Each option changes one thing
in README's rule (`benchmarks/options.py`). LimitGate sends rate headers, the peers don't. Flask-Limiter runs in Flask, one
request at a time, and is compared with bare Flask."""
_EASY = """\
`key: [ip]`, 250 clients, 1,000 per second, 5,000 per minute, 10,000 per day, without pauses."""


def page(results: Results) -> str:
    """Everything, as a page."""
    sections = [
        ("Targets", _bars(bars(results))),
        ("README's rule, 1,000 clients: CPU per request over the bare application, µs", _gate(results)),
        (f"README's rule, {CROWD:,} clients: CPU per request over the bare application, µs", _crowded(results)),
        ("README's whole example: CPU per request over its bare application, µs", _example(results)),
        (f"What each option costs, {CROWDED} at once: CPU per request over the bare application, µs", _options(results)),
        ("What a request costs Redis", _server(results)),
        ("WSGI: CPU per request over bare Flask, µs", _wsgi(results)),
        ("Frameworks: CPU per request over each bare framework, µs", _frameworks(results)),
        (f"Through uvicorn, one worker, uvloop, httptools, {CONNECTIONS} connections", _served(results)),
        ("One client far over its limit, 5 per second and 100 per minute", _attacks(results)),
        (f"{AT_ONCE:,} simultaneous requests, on Redis", _rushes(results)),
        ("Scaling: LimitGate's CPU over the bare application, µs", _growth(results)),
        ("Bytes per client, three windows", _memory(results)),
        (f"The easy case: CPU per request over the bare application, {CROWDED} at once, µs", _easy(results)),
        ("How it was measured", _HOW),
        ("Setup of each limiter", _setups({contender.name: contender.remark for contender in (*ASGI, WSGI[1])})),
    ]
    texts = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections if text)
    head = f"# LimitGate compared with its peers\n\n{_LEAD}\n\n{results.setting}.\n{results.setting.versions}."
    return f"{head}\n\n{texts}\n"


def summary(results: Results) -> str:
    """Four figures of each limiter, as a table that fits into README."""
    heads = [
        f"{CROWDED} requests at once on Redis",
        "CPU added, µs",
        "Redis' CPU, µs",
        "Redis commands per refusal",
        f"decided of {AT_ONCE:,} at once",
    ]
    rows = []
    for contender in ASGI:
        name = on_redis(contender.name)
        outcomes = results.gate.get(CROWDED, {})
        attack, rush = results.attacks.get(contender.name), results.rushes.get(contender.name)
        rows.append(
            [
                contender.name,
                _over(outcomes, name, contender.bare),
                _median(server(outcomes, name)),
                number(attack.commands) if attack else NOTHING,
                number(rush.decided) if rush else NOTHING,
            ]
        )
    return f"{table(heads, rows)}\n\nMeasured {results.setting}."


def inserted(text: str, block: str) -> str:
    """``text`` with ``block`` between its marks. Raises `ValueError` if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} … {END} to write between")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _setups(remarks: Mapping[str, str]) -> str:
    rows = [f"| {name} | {remark} |" for name, remark in remarks.items()]
    return "\n".join(["| limiter | setup |", "| --- | --- |", *rows])


def number(figure: float) -> str:
    """A figure with as many digits as it deserves."""
    if abs(figure) >= 10:
        return f"{figure:,.0f}"
    return f"{figure:.1f}" if abs(figure) >= 1 else f"{figure:.2g}"


def _bars(marks: Iterable[Bar]) -> str:
    rows = []
    for bar in marks:
        sign = "≥" if bar.higher_is_better else "≤"
        what = f"{bar.what} ({bar.note})" if bar.note else bar.what
        measured = NOTHING if bar.measured is None else _fine(bar.measured)
        rows.append([what, f"{sign} {_fine(bar.must)}", f"{sign} {_fine(bar.aim)}", measured, bar.verdict])
    return table(["", "required", "aim", "measured", "result"], rows)


def _fine(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def _gate(results: Results) -> str:
    if not results.gate:
        return ""
    calls = [[name, *[_over(outcomes, name, CALLER) for outcomes in results.gate.values()], NOTHING] for name in CALLS]
    tables = _on_both(results.gate, ASGI, calls)
    rows = [[name, *[_raw(outcomes, name) for outcomes in results.gate.values()]] for name in BARE]
    return "\n\n".join([*tables, _CALLS, table(["bare application (total CPU), at once", *map(str, results.gate)], rows)])


def _on_both(
    by_concurrency: Mapping[int, Outcomes], contenders: Sequence[Contender], calls: Sequence[Sequence[str]] = ()
) -> list[str]:
    """A table for each store, and what each contender leaves out."""
    tables = []
    for title, store, more in (("in memory", in_memory, ()), ("on Redis", on_redis, calls)):
        rows = [
            [
                contender.name,
                *[_over(outcomes, store(contender.name), contender.bare) for outcomes in by_concurrency.values()],
                contender.without or "nothing",
            ]
            for contender in contenders
        ]
        tables.append(table([f"{title}, at once", *map(str, by_concurrency), "lacks"], [*rows, *more]))
    return tables


def _crowded(results: Results) -> str:
    return "\n\n".join(_on_both(results.crowded, (ASGI[0], PEERS[0]))) if results.crowded else ""


def _example(results: Results) -> str:
    if not results.example:
        return ""
    rows = [
        [store(name), *[_over(outcomes, store(name), bare) for outcomes in results.example.values()]]
        for store in (in_memory, on_redis)
        for name, bare in ((PLAIN, ASGI[0].bare), (EXAMPLE, BARE_EXAMPLE))
    ]
    return f"{table(['at once', *map(str, results.example)], rows)}\n\n{_KINDS}"


def _options(results: Results) -> str:
    """A table for each store: every option beside the cheapest of its peers."""
    if not results.options:
        return ""
    tables = [
        table(
            [title, "µs", f"times {PLAIN}", "the cheapest peer", "its µs", "times the peer"],
            [_option(results.options, store, name, option) for name, option in options().items()],
        )
        for title, store in (("in memory", in_memory), ("on Redis", on_redis))
    ]
    return "\n\n".join([*tables, _COMPARED])


def _option(outcomes: Outcomes, store: Naming, name: str, option: Option) -> list[str]:
    ours, plain = (over(outcomes, store(one), ASGI[0].bare) for one in (name, PLAIN))
    cells = [name.replace("|", r"\|"), _over(outcomes, store(name), ASGI[0].bare), _times(ours, plain)]
    if not option.peers:
        return [*cells, "no peer", NOTHING, NOTHING]
    costs = {peer: over(outcomes, store(peer_of(name, peer)), peer.bare) for peer in option.peers}
    peer = best(costs) or option.peers[0]
    return [*cells, peer.name, _over(outcomes, store(peer_of(name, peer)), peer.bare), _times(ours, costs[peer])]


def _times(costs: Sequence[float] | None, others: Sequence[float] | None) -> str:
    times = ratio(costs, others)
    return NOTHING if times is None else _fine(times)


def _easy(results: Results) -> str:
    if not results.easy:
        return ""
    rows = [
        [contender.name, *[_over(results.easy, store(contender.name), contender.bare) for store in (in_memory, on_redis)]]
        for contender in (ASGI[0], PEERS[0])
    ]
    return f"{table(['', 'in memory', 'on Redis'], rows)}\n\n{_EASY}"


def _server(results: Results) -> str:
    if not results.gate:
        return ""
    names = [*[on_redis(contender.name) for contender in ASGI], *CALLS[:-1]]
    tables: dict[str, Cell] = {
        "CPU of the Redis process (in parentheses: inside commands), µs, at once": _in_redis,
        "commands sent by clients, at once": _commands,
    }
    return "\n\n".join(
        table(
            [title, *map(str, results.gate)],
            [[name, *[cell(outcomes, name) for outcomes in results.gate.values()]] for name in names],
        )
        for title, cell in tables.items()
    )


def _wsgi(results: Results) -> str:
    if not results.wsgi:
        return ""
    heads = ["threads", *map(str, results.wsgi)]
    rows = [
        [store(contender.name), *[_over(outcomes, store(contender.name), contender.bare) for outcomes in results.wsgi.values()]]
        for store in (on_redis, in_memory)
        for contender in WSGI
    ]
    return table(heads, [*rows, ["bare Flask (total CPU)", *[_raw(outcomes, "Flask") for outcomes in results.wsgi.values()]]])


def _frameworks(results: Results) -> str:
    if not results.frameworks:
        return ""
    known = [framework for framework in frameworks() if framework.name in results.frameworks]
    elsewhere = {contender.name for contender in (*ASGI, WSGI[1])}
    limiters = {limiter.name: limiter.remark for framework in known for limiter in framework.limiters}
    setups = {name: remark for name, remark in limiters.items() if name not in elsewhere}
    tables = [_framework(framework, results.frameworks[framework.name]) for framework in known]
    how = _setups(setups)
    return "\n\n".join([*tables, "All of this ran on one core. Django ran without its own middleware.", how])


def _framework(framework: Framework, by_concurrency: Mapping[int, Outcomes]) -> str:
    """Limiters by rows, concurrency by columns; last what the most at once cost in commands."""
    heads = [f"{concurrency} at once" for concurrency in by_concurrency]
    most = by_concurrency[max(by_concurrency)]
    rows = [
        [
            store(limiter.name),
            *[_over(outcomes, store(limiter.name), framework.name) for outcomes in by_concurrency.values()],
            _commands(most, store(limiter.name)),
        ]
        for store, limiter in product((on_redis, in_memory), framework.limiters)
    ]
    bare = [_raw(outcomes, framework.name) for outcomes in by_concurrency.values()]
    return table([framework.name, *heads, f"Redis commands, {heads[-1]}"], [*rows, ["bare (total CPU)", *bare, NOTHING]])


def _attacks(results: Results) -> str:
    if not results.attacks:
        return ""

    def row(name: str, attack: Attack) -> list[str]:
        return [
            name,
            number(attack.refused),
            number(attack.admitted),
            number(attack.cpu),
            number(attack.commands),
            attack.error or "none",
        ]

    heads = [
        "32 at once, on Redis",
        "refused",
        "admitted",
        "CPU per refused request, µs",
        "Redis commands per refused request",
        "errors",
    ]
    return table(heads, [row(name, attack) for name, attack in results.attacks.items()])


def _rushes(results: Results) -> str:
    if not results.rushes:
        return ""

    def row(name: str, rush: Rush) -> list[str]:
        return [name, number(rush.decided), rush.error or "none", number(rush.milliseconds)]

    return table(
        ["", "decided", "errors", "ms until the last response"],
        [row(name, rush) for name, rush in results.rushes.items()],
    )


def _served(results: Results) -> str:
    if results.throughput.missing:
        return f"Not measured: {results.throughput.missing}."
    rows = [
        [
            name,
            number(served.per_second),
            f"{served.of_bare:.0%}",
            _median(served.added),
            number(served.failed),
        ]
        for name, served in results.throughput.served.items()
    ]
    return table(["", "requests/s", "relative to its bare application", "CPU added in the server, µs", "failed"], rows)


def _growth(results: Results) -> str:
    if not results.growth:
        return ""
    return table(["", "small", "large", "ratio"], [_grown(one) for one in results.growth])


def _grown(one: Growth) -> list[str]:
    little, much = one.costs
    cells = [f"{count}: {_median(costs)}" for count, costs in ((one.little, little), (one.much, much))]
    return [one.what, *cells, _fine(ratio(much, little) or 0.0)]


def _memory(results: Results) -> str:
    if results.memory is None:
        return ""
    use = results.memory
    rows = [
        ["LimitGate on Redis, one rule, one key", number(use.one_key)],
        ["LimitGate on Redis, three rules, three keys", number(use.three_keys)],
        ["LimitGate's memory store", number(use.memory_store)],
        *[[f"{on_redis(name)}, after {REQUESTS} requests", number(size)] for name, size in use.clients.items()],
        *[[f"{name}, memory growth of the process, {CROWD:,} clients", number(size)] for name, size in use.process.items()],
    ]
    return table(["", "bytes"], rows)


# --- cells ------------------------------------------------------------------------------------------------------------


def _over(outcomes: Outcomes, name: str, base: str) -> str:
    """The median over a bare application, and the best round's."""
    taken, bare = outcomes.get(name), outcomes.get(base)
    if isinstance(taken, Failed):
        return f"fails ({taken.error})"
    if not isinstance(taken, Taken) or not isinstance(bare, Taken):
        return NOTHING
    least = min(turn.client for turn in taken.turns) - min(turn.client for turn in bare.turns)
    return f"{_median(over(outcomes, name, base))} ({number(least)})"


def _raw(outcomes: Outcomes, name: str) -> str:
    taken = outcomes.get(name)
    if isinstance(taken, Failed):
        return f"fails ({taken.error})"
    if taken is None:
        return NOTHING
    return f"{_median([turn.client for turn in taken.turns])} ({number(min(turn.client for turn in taken.turns))})"


def _in_redis(outcomes: Outcomes, name: str) -> str:
    taken = outcomes.get(name)
    if not isinstance(taken, Taken):
        return _raw(outcomes, name)
    return f"{_median(server(outcomes, name))} ({_median([turn.inside for turn in taken.turns])})"


def _commands(outcomes: Outcomes, name: str) -> str:
    taken = outcomes.get(name)
    return number(taken.commands) if isinstance(taken, Taken) else _raw(outcomes, name)


def _median(figures: Sequence[float] | None) -> str:
    return number(statistics.median(figures)) if figures else NOTHING
