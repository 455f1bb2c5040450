"""What is counted and reported of a service while it runs: metrics for observers, and log lines about refusals."""
