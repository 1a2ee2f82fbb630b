"""Strategies that apply the sum of all gradients in every step."""
