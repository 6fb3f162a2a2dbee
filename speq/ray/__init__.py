"""Ray: replicas of a server, stages of a model, and answers to files of requests."""
