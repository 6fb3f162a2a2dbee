"""Programs that others wrote, against our server. `make clients` runs them."""
