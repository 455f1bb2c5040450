"""HTTP in and out: the request and its client, the fields and refusals of a response. Pure."""
