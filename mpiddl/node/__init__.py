"""What the ranks of one node share: memory, locks and cores; and which rank is on which node."""
