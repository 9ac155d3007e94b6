"""`moed bench`: load on any OpenAI-compatible endpoint, and what its clients saw."""
