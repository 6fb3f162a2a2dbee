"""A server that clients of OpenAI's API talk to."""
