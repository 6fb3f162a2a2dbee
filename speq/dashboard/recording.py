"""Records a generator's runs for pictures, step by step."""
