"""What proposes tokens: a file for each drafter, and a line of `speq.registries.DRAFTERS`."""
