"""Process groups, the per-step agreement, and the backends that carry rows to experts and back."""
