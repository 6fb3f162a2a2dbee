"""Developer tools: pages generated from the code, builds, and runs on other machines."""
