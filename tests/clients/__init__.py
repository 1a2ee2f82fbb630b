"""The hardest clients of the strategy interface, each in at most 60 lines: they prove the interface, they are no products."""
