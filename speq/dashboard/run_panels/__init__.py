"""Pictures of a run, one file each; `run_page` has them together."""
