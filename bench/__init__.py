"""Measurements and their reports. Timings live here, not in tests."""
