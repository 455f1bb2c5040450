"""Budgets for language models: limits on requests and on tokens, in and out.

estimate.py         tokens that a request will probably cost
usage.py            tokens that a response says it has cost
provider_fields.py  the rate fields of providers
"""
