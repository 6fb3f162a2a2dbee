"""What the product must give, written from the definitions: no module here imports speq."""
