"""What is counted and told of a service while it runs: figures for observers, and log lines about refusals."""
