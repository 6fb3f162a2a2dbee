"""What is run beside the library: pages made from the code, builds, and runs on other machines."""
