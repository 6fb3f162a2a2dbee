"""Every measurement, one after the other, and the page that tells of all."""
