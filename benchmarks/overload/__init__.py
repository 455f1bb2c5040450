"""LimitGate's adaptive limit under real overload: ``python -m benchmarks.overload``.

client.py    open-loop client: requests come at their times, whether or not anything answers
backend.py   what handlers wait for: a few connections, of 50 ms a request
app.py       the applications that uvicorn serves, with and without a limit
servers.py   uvicorn on one core, and what CPU it has spent
runs.py      one run: a server under a load, and what became of the requests
rows.py      what is measured, row by row
report.py    the table, and whether each bar was met
attacks.py   clients that try to have honest ones refused: `python -m benchmarks.overload.attacks`
pictures.py  docs/overload-*.svg
"""
