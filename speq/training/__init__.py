"""Training of a model's draft head: texts to features, features to a head, a head to a report."""
