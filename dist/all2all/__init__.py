"""Dispatch and combine: how rows reach the ranks of their experts and come home."""
