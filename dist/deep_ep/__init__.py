"""DeepEP: how it is found, what its calls look like, and a stand-in for it that needs no GPU."""
