"""Budgets for language models: limits on requests and on tokens, in and out.

budget.py           `Budget`: its limits, keys and estimates
windows.py          the limits of a budget by kind, and what a request costs of each
spending.py         one request: reserves the estimate, settles what was used
outgoing.py         a request of a throttled client, whose response is read along
keeper.py           renews holds of requests under way, and reports them to other processes
fair_share.py       turns for the tenants of a process
told_limits.py      limits that a provider states
estimate.py         tokens that a request will probably cost
usage.py            tokens that a response says it has cost
provider_fields.py  the rate fields of providers
"""

from limitgate.messages.text import extra

with extra("httpx2", "http_sf"):
    import http_sf  # noqa: F401 - raises here if the extra is missing

from limitgate.llm.budget import Budget
from limitgate.llm.usage import Usage

__all__ = ["Budget", "Usage"]
