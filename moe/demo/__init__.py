"""The bundled demo model: its corpus, its training script and the checkpoint they produce."""
