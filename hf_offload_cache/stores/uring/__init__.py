"""Records read through io_uring."""
