"""Results as Markdown: the page in docs/, the summary in README."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

from benchmarks.attack import AT_ONCE, Attack, Rush
from benchmarks.contenders import BARE, WSGI
from benchmarks.cpu import CALLER, NO_OP, SCRIPT, in_memory, on_redis
from benchmarks.end_to_end import CONNECTIONS
from benchmarks.figures import Bar, Failed, Outcomes, Taken, over, ratio, server
from benchmarks.frameworks import WINDOWS, Framework, copy_name, frameworks
from benchmarks.growth import Growth
from benchmarks.memory_use import REQUESTS
from benchmarks.results import ASGI, CROWDED, Results, bars

BEGIN, END = "<!-- benchmark -->", "<!-- /benchmark -->"
"""What the summary stands between in README."""
NOTHING = "-"

Cell = Callable[[Outcomes, str], str]
"""What to write about one contender."""

_HOW = """\
Each contender is the same application with one route, limited by client address under three windows (1,000 per second, 5,000
per minute, 10,000 per day) that refuse nothing here; one that answers anything but 200 is shown as failing. Requests come from
250 addresses. CPU is that of the process that handles requests, straight into the application without a server; what is shown
is the difference to the bare application. The machine's speed drifts by half within minutes, so all take turns in many short
rounds: a figure is the median over the rounds, in brackets the best round less the bare application's best, and a ratio is the
median of the ratios within each round. Redis stands beside, on a unix socket; its CPU is that of its process, as INFO has it;
its commands are counted by MONITOR in a turn that is not timed. All use the redis-py named above with its defaults: its pool
refuses the 101st connection that is wanted at once."""


def page(results: Results) -> str:
    """Everything, as a page."""
    sections = [
        ("What was aimed at", _bars(bars(results))),
        ("CPU per request over the bare application, µs", _cpu(results)),
        ("What a request costs Redis", _server(results)),
        ("WSGI: CPU per request over bare Flask, µs", _wsgi(results)),
        ("Frameworks: CPU per request over each bare framework, µs", _frameworks(results)),
        ("One client far over its limit, 5 per second and 100 per minute", _attacks(results)),
        (f"{AT_ONCE:,} requests at the same moment, on Redis", _rushes(results)),
        (f"Through uvicorn, one worker, h11, {CONNECTIONS} connections", _served(results)),
        ("What must not grow: LimitGate's CPU over the bare application, µs", _growth(results)),
        ("Bytes for each client, three windows", _memory(results)),
        ("How it was measured", _HOW),
        ("How each was set up", "\n".join(f"* {contender.name}: {contender.remark}" for contender in (*ASGI, WSGI[1]))),
    ]
    texts = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections if text)
    head = f"# LimitGate beside its peers\n\n`make bench` wrote this page.\n\n{results.setting}.\n{results.setting.versions}."
    return f"{head}\n\n{texts}\n"


def summary(results: Results) -> str:
    """A table that fits into README."""
    heads = [
        "three windows on Redis",
        *[f"CPU over bare app, {concurrency} at once, µs" for concurrency in results.asgi],
        f"Redis' CPU, {CROWDED} at once, µs",
        "Redis commands",
        "commands per refusal",
        f"decided of {AT_ONCE:,} at once",
        "requests/s of bare app's",
    ]
    rows = []
    for contender in ASGI:
        name = on_redis(contender.name)
        outcomes = results.asgi.get(CROWDED, {})
        attack, rush = results.attacks.get(contender.name), results.rushes.get(contender.name)
        served = results.throughput.served.get(name)
        rows.append(
            [
                contender.name,
                *[_over(at_once, name, contender.bare) for at_once in results.asgi.values()],
                _median(server(outcomes, name)),
                _commands(outcomes, name),
                number(attack.commands) if attack else NOTHING,
                number(rush.decided) if rush else NOTHING,
                f"{served.of_bare:.0%}" if served else NOTHING,
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
    return table(["", "must", "aim", "measured", "so"], rows)


def _fine(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2g}"


def _cpu(results: Results) -> str:
    if not results.asgi:
        return ""
    heads = ["at once", *map(str, results.asgi)]
    parts = []
    for title, store in (("on Redis", on_redis), ("in memory", in_memory)):
        rows = [
            [contender.name, *[_over(outcomes, store(contender.name), contender.bare) for outcomes in results.asgi.values()]]
            for contender in ASGI
        ]
        if store is on_redis:
            rows += [[name, *[_over(outcomes, name, CALLER) for outcomes in results.asgi.values()]] for name in (NO_OP, SCRIPT)]
        parts.append(table([f"{title}, {heads[0]}", *heads[1:]], rows))
    rows = [[name, *[_raw(outcomes, name) for outcomes in results.asgi.values()]] for name in BARE]
    parts.append(table(["to compare with, not over anything, at once", *heads[1:]], rows))
    return "\n\n".join(parts)


def _server(results: Results) -> str:
    if not results.asgi:
        return ""
    names = [*[on_redis(contender.name) for contender in ASGI], NO_OP, SCRIPT]
    tables: dict[str, Cell] = {
        "CPU of its process, in brackets the time inside commands, µs; at once": _in_redis,
        "commands that clients send; at once": _commands,
    }
    return "\n\n".join(
        table(
            [title, *map(str, results.asgi)],
            [[name, *[cell(outcomes, name) for outcomes in results.asgi.values()]] for name in names],
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
    return table(
        heads, [*rows, ["bare Flask, not over anything", *[_raw(outcomes, "Flask") for outcomes in results.wsgi.values()]]]
    )


def _frameworks(results: Results) -> str:
    if not results.frameworks:
        return ""
    known = [framework for framework in frameworks() if framework.name in results.frameworks]
    setups = {limiter.name: limiter.remark for framework in known for limiter in framework.limiters}
    tables = [_framework(framework, results.frameworks[framework.name]) for framework in known]
    how = "\n".join(f"* {name}: {remark}" for name, remark in setups.items())
    return "\n\n".join([*tables, "All of this on one core; Django has no middleware of its own here.", how])


def _framework(framework: Framework, by_concurrency: Mapping[int, Outcomes]) -> str:
    """Limiters by rows, concurrency and number of windows by columns; last what the most windows cost in commands."""
    columns = [(concurrency, windows) for concurrency in by_concurrency for windows in WINDOWS]
    most = columns[-1]
    heads = [f"{windows}, {concurrency} at once" for concurrency, windows in columns]
    rows = []
    for store, limiter in product((on_redis, in_memory), framework.limiters):
        cells = [
            _over(by_concurrency[concurrency], copy_name(limiter, windows, store), framework.name)
            for concurrency, windows in columns
        ]
        commands = _commands(by_concurrency[most[0]], copy_name(limiter, most[1], store))
        rows.append([store(limiter.name), *cells, commands])
    bare = [_raw(by_concurrency[concurrency], framework.name) for concurrency, _ in columns]
    return table([framework.name, *heads, f"Redis commands, {heads[-1]}"], [*rows, ["bare, not over anything", *bare, NOTHING]])


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
        ["", "answered by a decision", "errors", "ms until all were answered"],
        [row(name, rush) for name, rush in results.rushes.items()],
    )


def _served(results: Results) -> str:
    if results.throughput.missing:
        return f"Not measured: {results.throughput.missing}."
    rows = [
        [name, number(served.per_second), f"{served.of_bare:.0%}", number(served.failed)]
        for name, served in results.throughput.served.items()
    ]
    return table(["", "requests/s", "of its bare application's", "failed"], rows)


def _growth(results: Results) -> str:
    if not results.growth:
        return ""
    return table(["", "little", "much", "times"], [_grown(one) for one in results.growth])


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
