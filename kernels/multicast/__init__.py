"""Datagrams: their tags."""
