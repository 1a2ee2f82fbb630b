"""Parameter servers: shards, their transport, and what all update rules have in common."""
