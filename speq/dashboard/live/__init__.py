"""What the live page shows: requests of a server, while they run."""
