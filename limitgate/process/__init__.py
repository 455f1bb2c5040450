"""What belongs to the process and not to a request: its forks, threads, GIL, sockets and clock."""
