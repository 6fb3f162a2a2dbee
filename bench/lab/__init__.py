"""Run benches that are not installed: `python -m bench.lab.NAME`, from a checkout."""
