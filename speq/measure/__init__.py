"""What users measure of a model on their machine: tune, check, the link, routes, reports."""
