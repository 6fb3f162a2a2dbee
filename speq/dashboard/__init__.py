"""What people look at: pages of runs and of benches, the live page, and the terminal's view."""
