"""Which exact experts lie on the device, which are fetched next, and how. Never imports models."""
