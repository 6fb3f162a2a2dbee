"""Files of requests, answered as a whole."""
