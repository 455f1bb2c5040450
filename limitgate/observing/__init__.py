"""What is counted and told of a service while it runs."""
