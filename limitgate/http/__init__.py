"""HTTP in and out: requests and clients, header fields and refusals. Pure."""
