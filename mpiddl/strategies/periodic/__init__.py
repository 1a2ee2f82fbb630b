"""Strategies that exchange late or seldom: averages after several steps, sums a step later."""
