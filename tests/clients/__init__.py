"""The hardest clients of the strategy interface, each in a file of at most 60 lines. They prove the interface; they are no products."""
