"""Process-wide concerns: forks, threads, sockets and clocks."""
