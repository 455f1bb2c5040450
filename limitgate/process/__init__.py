"""What belongs to the process and not to a request: its forks, threads, sockets and clock."""
