"""Panels of a run's page, one file each; `run_page` puts them together."""
